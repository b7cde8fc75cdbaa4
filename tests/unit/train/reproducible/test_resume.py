"""Tests that a reproducible run has the same bits when workers and layout change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.benchmarks.equivalence import prepare, settings, train_all
from tests.ranks import on_ranks
from tests.unit.train.parallel.test_resume import some_steps
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.digest import digest
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig

STEPS = 8
RECIPE = ["reproducible=true", "evaluation.every_steps=3", "guards.window=8", "neftune_alpha=5"]
LEGS = [(4, ["parallel.data=zero2"]), (2, ["parallel.data=zero3", "parallel.reduce=micro_batch"]),
        (1, []), (4, ["parallel.data=zero3", "parallel.replicate=2"])]
"""Number of workers and layout, two steps each."""


def leg(config: TrainConfig, generation: int) -> None:
    some_steps(config, generation, leave=-1 if generation == len(LEGS) - 1 else 2)


def figures(config: TrainConfig) -> dict[int, Any]:
    """Return losses and norms by step from metrics.jsonl, without times and numbers of workers."""
    results: dict[int, Any] = {}
    for line in jsonlog.read(storage.store(config.run_uri), "metrics.jsonl"):
        wanted = {key: line[key] for key in ("tokens", "loss", "gradient_norm", "learning_rate", "validation_loss")
                  if key in line}
        results[line["step"]] = {**results.get(line["step"], {}), **wanted}
    return results


def test_any_history_has_the_same_bits(tmp_path: Path):
    prepare(tmp_path)
    still = settings(tmp_path, "still", STEPS, RECIPE)
    train_all([still])
    for generation, (workers, layout) in enumerate(LEGS):
        moved = settings(tmp_path, "moved", STEPS, [*RECIPE, *layout])
        on_ranks(workers, leg, moved, generation)
    assert figures(moved) == figures(still)
    assert len(figures(moved)) == STEPS
    assert digest(moved.run_uri).state == digest(still.run_uri).state
    audited = audit(moved.run_uri)
    assert audited.ok, audited.summary()
    assert (audited.redone, audited.world_sizes) == (0, (4, 2, 1, 4))
