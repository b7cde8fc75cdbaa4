"""A user's own parts of six kinds on Ray: workers find the code, also after one is killed.

The last output of the killed worker is in the run's logs.
"""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

import tidewheel as tw
from tests.cluster.small_ray import small_ray
from tests.own_parts import overrides, write_parts
from tests.unit.train.helpers import config, write_shards
from tidewheel.checkpoint.digest import digest
from tidewheel.config import load
from tidewheel.elastic.trainer import fit, fit_local
from tidewheel.storage import store
from tidewheel.train import objectives, optimizers, schedules
from tidewheel.train.config import TrainConfig
from tidewheel.train.logs.read import LineFilter, RunLogs

# `test_wheel.py` does the same with the parts of a wheel's user
pytestmark = [pytest.mark.cluster, pytest.mark.long]
SMALL = ("steps=8", "model.num_layers=1", "batch.virtual_ranks=2", "batch.micro_sequences=4",
         "evaluation.every_steps=0", "evaluation.sample_tokens=0", "checkpoint.every_steps=2")


def test_own_parts_travel_and_a_killed_worker_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", rows=4, seed=1)
    module, file, hold = write_parts(tmp_path), tmp_path / "calm.yaml", tmp_path / "hold"
    with small_ray(2):
        monkeypatch.chdir(tmp_path)  # only now, so that Ray's workers do not inherit it
        file.write_text(yaml.safe_dump(config(tmp_path, "calm", *SMALL, *overrides(module)).canonical()))
        calm = load(TrainConfig, file)
        killed = tw.Train(
            config(tmp_path, "killed", *SMALL, "reproducible=true").canonical(),
            model=calm.model,
            optimizer=optimizers.KIND.build(f"{module}:Momentum", {"learning_rate": 0.05}),
            schedule=schedules.KIND.build(f"{module}:Stairs", {"warmup_steps": 0}),
            objective=objectives.KIND.build(f"{module}:Smooth", {"smoothing": 0.2}), callbacks=[f"{module}:Diary"],
            metrics={"trackers": [{"kind": f"{module}:Table", "path": str(tmp_path / "table")}]}).resolve()
        assert killed.recipe_hash() == calm.recipe_hash(), "the SDK says what the file says"
        hold.touch()
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(fit, killed)
            until = time.monotonic() + 600
            while len(waiting := list(tmp_path.glob("waits-*"))) < 2 and time.monotonic() < until:
                time.sleep(0.05)
            victim = waiting[0].name.partition("-")[2] if len(waiting) == 2 else ""
            if victim:
                os.kill(int(victim), signal.SIGKILL)
            hold.unlink()
            assert training.result(120).steps == 8
        assert victim, "two workers computed the schedule of step 6"
    fit_local(calm)
    assert digest(killed.run_uri).state == digest(calm.run_uri).state
    assert measured(tmp_path / "runs/killed") == measured(tmp_path / "runs/calm")
    failures = [line["detail"] for line in lines(tmp_path / "runs/killed/events.jsonl") if line["kind"] == "failure"]
    assert len([one for one in failures if one["generation"] >= 0]) == 1  # on a busy machine, a worker may start late
    said = [line for line in RunLogs(store(killed.run_uri)).new(LineFilter()) if line.text.startswith("told of step")]
    last = [line for line in said if f"-{victim}-" in line.process][-1]
    assert last.text == "told of step 5 first"
    assert {line.rank for line in said} == {0, 1}
    assert len(said) == len({(line.process, line.generation, line.step, line.text) for line in said}), "printed once"
    assert {f"told of step {step} first" for step in range(1, 9)} <= {line.text for line in said}
    table = [line.split() for line in (tmp_path / "table").read_text().splitlines()]
    assert {int(step): float(value) for step, value in table} == measured(tmp_path / "runs/calm")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(run: Path) -> dict[int, float]:
    """Return the accuracy of each step in the run's metrics."""
    return {line["step"]: line["objective"]["accuracy"] for line in lines(run / "metrics.jsonl") if "objective" in line}
