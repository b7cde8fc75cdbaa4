"""The contract between data and training: packed sequences in Arrow files, a manifest, and a reading order."""
