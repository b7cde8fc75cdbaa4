"""A few pairs of the table of `python -m tests.benchmarks.resharding`: every degree is saved and loaded once."""

from pathlib import Path

import pytest

from tests.benchmarks.resharding import Layout, run


@pytest.mark.timeout(200)
def test_a_checkpoint_loads_into_another_layout(tmp_path: Path):
    alone, two, tensor, both = Layout(1), Layout(2), Layout(4, tensor=2), Layout(4, tensor=2, pipeline=2)
    table = run(tmp_path, [(two, both), (both, alone), (both, tensor), (alone, two)])
    assert all(line["within"] for line in table), table
    assert all(line["tensors"] > 70 for line in table)
