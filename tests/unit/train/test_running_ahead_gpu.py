"""Tests on a CUDA device that running ahead, copies on a stream and fused updates change no figure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.train.helpers import config, write_shards
from tests.unit.train.optim.test_optimizers import KINDS
from tests.unit.train.test_bad_steps import log, plant, sequences
from tidewheel import storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.train.audit import audit
from tidewheel.train.host_copy import HostCopy
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BASE = ("steps=12", "data.validation=''", "evaluation={every_steps: 0, sample_tokens: 0}", "checkpoint.every_steps=5",
        "guards.window=8", "guards.non_finite=rollback", "metrics.trackers=[]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ahead")
    write_shards(base / "shards", rows=60)
    return base


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_runs_ahead_has_the_same_figures(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    plant({sequences(folder, 8)[2]: "nan"}, monkeypatch)
    figures = []
    for ahead in ("false", "true"):
        settings = config(folder, f"{kind}-{ahead}", *BASE, f"optimizer={{kind: {kind}}}", f"run_ahead={ahead}")
        manager = CheckpointManager(storage.store(settings.run_uri).child("checkpoints"), asynchronous=False)
        train(settings, Runtime(device="cuda", checkpoints=manager))
        assert audit(settings.run_uri).ok
        figures.append([(line["step"], line["loss"]) for line in log(settings, "metrics.jsonl")])
    assert [step for step, _ in figures[0]] == [step for step, _ in figures[1]]
    assert [loss for _, loss in figures[0]] == pytest.approx([loss for _, loss in figures[1]], rel=1e-4)


def test_values_are_read_back_when_the_device_gets_there():
    values = torch.zeros(3, device="cuda")
    torch.cuda._sleep(50_000_000)
    values += 1
    copy = HostCopy(values)
    values += 1
    assert copy.wait().tolist() == [1.0, 1.0, 1.0]
