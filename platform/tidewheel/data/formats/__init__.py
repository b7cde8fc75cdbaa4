"""The built-in readers, a module each: what a recipe names under `read.format`."""
