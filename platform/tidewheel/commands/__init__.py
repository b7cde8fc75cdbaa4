"""The groups of the command line, a module each. Heavy imports happen inside the commands."""
