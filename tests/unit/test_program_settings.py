"""The settings of the programs that `make test` does not run are still accepted.

Type checks see a changed function, but not a renamed key in a dictionary of settings.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from tests import sums
from tests.benchmarks import equivalence, overhead, plan_published, reproducible
from tests.chaos import workflow, world


def test_of_the_chaos_and_goodput_runs(tmp_path: Path):
    settings = world.settings(tmp_path, "run", 100, workers=4, overrides=("reproducible=true",))
    assert settings.elastic.max_workers == 4
    assert settings.metrics.trackers == ()


def test_of_the_chaos_workflow():
    assert workflow.flow().name == "chaos"


def test_of_the_runs_on_sums(tmp_path: Path):
    settings = sums.sums_run(tmp_path, "run", "base", 4, "rollouts.generators.processes=2", "elastic.max_workers=2")
    assert settings.rollouts is not None
    assert settings.reproducible


def test_of_every_row_of_the_equivalence_table(tmp_path: Path):
    for row in equivalence.ROWS:
        assert equivalence.settings(tmp_path, "run", 10, [*row.layout, *row.recipe]).steps == 10


def test_of_the_overhead_of_the_loop(tmp_path: Path):
    options = Namespace(pairs=2, warm=1, preset="", threads=1)
    assert overhead._config(str(tmp_path), "shards", options).steps == 4


def test_of_reproducible_mode():
    assert reproducible.settings(True, {}).reproducible


def test_of_published_runs():
    for run in plan_published.RUNS:
        tokens_per_second, _ = plan_published.predicted(run)
        assert tokens_per_second > 0
