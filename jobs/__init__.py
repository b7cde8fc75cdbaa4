"""Entry points that `ray job submit` runs: one module per job, each run as `python -m jobs.NAME --config FILE ...`."""
