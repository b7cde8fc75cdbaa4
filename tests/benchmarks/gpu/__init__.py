"""Benchmark of one GPU: `python -m tests.benchmarks.gpu`, or `make gpu`. README.md says what runs where."""
