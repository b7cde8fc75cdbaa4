"""The groups of commands, one module each. Heavy imports happen inside the commands."""
