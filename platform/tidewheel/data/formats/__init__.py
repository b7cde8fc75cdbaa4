"""The built-in readers, one per module. `read.format` in a recipe names one of them."""
