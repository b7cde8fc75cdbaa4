"""A short version of `python -m tests.benchmarks.resharding`: one pair of layouts."""

from pathlib import Path

from tests.benchmarks.resharding import Layout, run


def test_a_checkpoint_loads_into_another_layout(tmp_path: Path):
    table = run(tmp_path, [(Layout(2), Layout(4, tensor=2, pipeline=2))])
    assert all(line["within"] for line in table), table
    assert all(line["tensors"] > 70 for line in table)
