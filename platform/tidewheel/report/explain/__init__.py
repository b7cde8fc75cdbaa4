"""What went wrong in a run, why, and what to do about it: `tidewheel explain` and a section of the report."""
