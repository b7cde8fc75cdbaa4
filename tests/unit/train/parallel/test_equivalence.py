"""A short version of `python -m tests.benchmarks.equivalence`: a few steps, one start of four processes."""

import pytest

from tests.benchmarks.equivalence import ROWS, run

STEPS = 4
LONG = ("TP 2 x DDP 2", "TP 2 x ZeRO-1 2", "CP 2 x DDP 2", "CP 2 x ZeRO-1 2", "CP 2 x FSDP 2", "PP 2 x CP 2")
SHORT = [row for row in ROWS if row.ranks == 4 and not row.recipe and not row.name.startswith("PP 2, ")
         and "activations" not in row.name and "in chunks" not in row.name and row.name not in LONG]
"""Each schedule of a pipeline by itself: test_pipeline.py; other recipes: with what makes them."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return {line["layout"]: line for line in run(tmp_path_factory.mktemp("equivalence"), SHORT, STEPS)}


@pytest.mark.parametrize("name", [row.name for row in SHORT])
def test_the_layout_does_not_change_the_run(table: dict[str, dict], name: str):
    assert table[name]["within"], table[name]
