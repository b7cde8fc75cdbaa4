"""A short version of `python -m tests.benchmarks.equivalence`: a few steps, one start of four processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.equivalence import run
from tests.benchmarks.equivalence_rows import ROWS

STEPS = 3
NAMES = ("DDP, 4 ranks", "ZeRO-1, 4 ranks", "ZeRO-3, 4 ranks", "HSDP 2 x 2", "PP 4, 4 layers", "TP 2 x FSDP 2",
         "CP 2 x HSDP 2", "TP 2 x CP 2", "PP 2 x TP 2")
SHORT = [row for row in ROWS if row.name in NAMES]
"""Each kind once; each schedule of a pipeline: test_pipeline.py; other recipes: with what makes them."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return {line["layout"]: line for line in run(tmp_path_factory.mktemp("equivalence"), SHORT, STEPS)}


@pytest.mark.parametrize("name", [row.name for row in SHORT])
def test_the_layout_does_not_change_the_run(table: dict[str, dict], name: str):
    assert table[name]["within"], table[name]


@pytest.mark.long
@pytest.mark.parametrize("name", [row.name for row in ROWS if row.name.startswith("3-D")])
def test_products_of_three_dimensions_do_not_change_the_run(tmp_path: Path, name: str):
    (line,) = run(tmp_path, [row for row in ROWS if row.name == name], STEPS)
    assert line["within"], line
