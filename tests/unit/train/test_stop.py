"""Tests of Ctrl-C during training in this process: the run saves, and the next start continues after the save."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.elastic.trainer import fit_local
from tidewheel.stopping import Stopped, stopping
from tidewheel.train.audit import audit


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_at_the_end_of_the_step_and_loses_none(number: int, tmp_path: Path):
    write_shards(tmp_path / "shards")
    settings = config(tmp_path, "run", "data.validation=''", "evaluation={every_steps: 0, sample_tokens: 0}",
                      "checkpoint.every_steps=1000", "precision=fp32")

    def interrupt(progress: dict[str, Any]) -> None:
        if progress.get("step") == 3:
            os.kill(os.getpid(), number)

    def block() -> None:
        with stopping(ends_itself=True) as stop:
            fit_local(settings, on_progress=interrupt, stop=stop)

    with pytest.raises(Stopped, match=r"saved at step \d") as stopped:
        block()
    assert stopped.value.exit_code == 128 + number
    run = storage.store(settings.run_uri)
    [saved] = [info.step for info in list_checkpoints(run.child("checkpoints")) if info.complete]
    assert saved in (3, 4)
    assert fit_local(settings).steps == 8
    assert [event["detail"]["redo"] for event in jsonlog.read(run, "events.jsonl") if event["kind"] == "resume"] == [0]
    assert audit(settings.run_uri).ok
