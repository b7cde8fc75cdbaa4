"""Sinks of the built-in trackers."""
