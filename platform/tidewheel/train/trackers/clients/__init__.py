"""What built-in trackers write with."""
