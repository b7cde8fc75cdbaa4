"""Entry points that `ray job submit` runs: one module a job, each `python -m jobs.NAME --config FILE ...`."""
