"""Pipeline schedules for Tidewheel that are for study and comparison."""
