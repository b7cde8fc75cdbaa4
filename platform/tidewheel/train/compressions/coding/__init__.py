"""What the built-in compressions compute."""
