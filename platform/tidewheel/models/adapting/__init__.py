"""How adapters work: the modules that they add, where these are attached, and their files."""
