"""An upload stops with its generation, and nothing waits for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.helpers import HangingStore
from tests.unit.train.helpers import config
from tidewheel.elastic import worker
from tidewheel.elastic.messages import Join
from tidewheel.elastic.process_group import GenerationGroup

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Control:
    """A collector of a worker's events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, **detail: Any) -> None:
        self.events.append((kind, detail))


@pytest.mark.parametrize("outcome", ["broken off", "failed", "over"])
def test_an_upload_ends_with_its_generation(outcome: str, tmp_path: Path) -> None:
    store = HangingStore(tmp_path)
    run = SimpleNamespace(config=config(tmp_path), checkpoints=store)
    group = GenerationGroup()
    control = Control()
    state = {"model": {"w": torch.zeros(3)}}
    try:
        with worker._checkpoints(run, Join(0, 0, 1), control, group) as checkpoints:  # type: ignore[arg-type]
            checkpoints.save(1, state, {})
            assert store.entered.wait(60)
            if outcome == "broken off":
                group.break_off()
            if outcome == "failed":
                raise RuntimeError("a peer is gone")
    except RuntimeError:
        assert outcome == "failed"
    checkpoints.wait()  # returns although the folder still hangs
    [(kind, detail)] = control.events
    assert kind == "save_failed"
    assert "its workers have parted" in detail["reason"]
    store.released.set()
