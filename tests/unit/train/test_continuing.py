"""Tests that a decayed run with more steps continues from before its decay, with the bits of the longer run."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.retention import Keep
from tidewheel.checkpoint.verify import CheckpointInfo, list_checkpoints
from tidewheel.config import build
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.continuing import Continuing
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime

WSD = ("schedule.kind=wsd", "schedule.decay_fraction=0.5", "schedule.final_fraction=0.0", "evaluation.every_steps=0",
       "evaluation.sample_tokens=0", "reproducible=true", "metrics.every_steps=1", 'data.validation=""',
       "checkpoint.every_steps=3", "checkpoint.keep_last=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with shards, and the finished run "long" of 12 steps, which decays from step 7 on."""
    folder = tmp_path_factory.mktemp("continuing")
    write_shards(folder / "shards")
    fit_local(config(folder, "long", *WSD, "steps=12"))
    return folder


BATCH = {"global_sequences": 16, "micro_sequences": 4, "virtual_ranks": 4}


def lines(folder: Path, run: str, name: str) -> list[dict[str, Any]]:
    return jsonlog.read(storage.store(folder / "runs" / run), name)


def losses(folder: Path, run: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(folder, run, "metrics.jsonl") if "loss" in line}


def rates(folder: Path, run: str) -> dict[int, float]:
    return {line["step"]: line["learning_rate"] for line in lines(folder, run, "metrics.jsonl") if "loss" in line}


def steps(folder: Path, run: str) -> list[int]:
    return [info.step for info in list_checkpoints(storage.store(folder / "runs" / run / "checkpoints"))]


def events(folder: Path, run: str, kind: str) -> list[dict[str, Any]]:
    return [line["detail"] for line in lines(folder, run, "events.jsonl") if line["kind"] == kind]


def test_more_steps_continue_from_before_the_decay_with_the_bits_of_the_longer_run(folder: Path):
    fit_local(config(folder, "short", *WSD, "steps=8"))
    assert rates(folder, "short")[8] == 0, "decayed to nothing"
    assert steps(folder, "short") == [4, 8], "the last step before the decay is saved, and kept beside the newest"
    fit_local(config(folder, "short", *WSD, "steps=12"))
    assert events(folder, "short", "continued_before_decay") == [{"step": 4, "newest": 8, "steps": 12}]
    assert losses(folder, "short") == losses(folder, "long")
    assert rates(folder, "short") == rates(folder, "long")
    audited = audit(str(folder / "runs/short"))
    assert audited.ok, audited.summary()
    assert (audited.steps, audited.redone) == (12, 4)
    assert steps(folder, "short") == [6, 12]


def test_a_run_killed_after_it_went_back_continues_the_longer_run(folder: Path):
    fit_local(config(folder, "killed", *WSD, "steps=8"))

    def kill(progress: dict[str, Any]) -> None:
        if progress.get("step") == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_local(config(folder, "killed", *WSD, "steps=12"), on_progress=kill)
    fit_local(config(folder, "killed", *WSD, "steps=12"))
    assert losses(folder, "killed") == losses(folder, "long")


def train_here(settings: TrainConfig) -> None:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    manager = CheckpointManager(storage.store(settings.run_uri).child("checkpoints"), keep_last=1)
    train(settings, Runtime(rank, size, generation=size, checkpoints=manager))


@pytest.mark.long
def test_two_ranks_go_back_together(folder: Path):
    train_here(config(folder, "ranks", *WSD, "steps=8"))
    on_ranks(2, train_here, config(folder, "ranks", *WSD, "steps=12"))
    assert losses(folder, "ranks") == losses(folder, "long")


def test_without_a_checkpoint_before_the_decay_the_error_says_how_to_go_on(folder: Path):
    fit_local(config(folder, "gone", *WSD, "steps=8"))
    store = storage.store(folder / "runs/gone/checkpoints")
    store.delete_tree("step_00000004")
    before = steps(folder, "gone")
    with pytest.raises(CheckpointError, match=r"(?s)step 8 has decayed.*began after step 4.*schedule\.reheat=true"):
        fit_local(config(folder, "gone", *WSD, "steps=12"))
    assert steps(folder, "gone") == before == [8]
    fit_local(config(folder, "gone", *WSD, "steps=12", "schedule.reheat=true"))
    assert rates(folder, "gone")[9] > 0
    assert not events(folder, "gone", "continued_before_decay")


def check(now: dict[str, Any], saved: dict[str, Any], step: int) -> bool:
    values = {"batch": BATCH, **now}
    extra = {"step": step, "schedule": {"kind": "wsd", "decay_fraction": 0.2, "warmup_steps": 0, **saved}}
    return Continuing(build(TrainConfig, values), 16).usable(extra)


def test_only_a_decayed_state_whose_rate_would_rise_again_is_passed_by():
    wsd = {"kind": "wsd", "warmup_steps": 0}
    saved = {"steps": 100}
    assert check({"schedule": wsd, "steps": 100}, saved, 90), "a restart in the middle of the decay"
    assert check({"schedule": wsd, "steps": 200}, saved, 80), "before the decay"
    assert not check({"schedule": wsd, "steps": 200}, saved, 81)
    assert not check({"schedule": {**wsd, "decay_fraction": 0.5}, "steps": 110}, saved, 100), "half decayed anew"
    assert check({"schedule": wsd, "steps": 95}, saved, 90), "fewer steps: the rate falls faster"
    assert check({"schedule": {**wsd, "final_fraction": 0.2}, "steps": 100}, saved, 90), "another end of the decay"
    assert not check({"schedule": "constant", "steps": 200}, saved, 100)
    assert check({"schedule": {**wsd, "reheat": True}, "steps": 200}, saved, 100)
    assert check({"schedule": wsd, "steps": 200}, {"steps": 100, "kind": "cosine"} | {"decay_fraction": 0.2}, 100), (
        "a schedule that cannot be read")
    tokens = {"kind": "wsd", "unit": "tokens", "decay_tokens": 20 * 16 * 16, "warmup_steps": 0}  # of 256 in a step
    for step, usable in ((80, True), (81, False)):
        extra = {"step": step, "schedule": {**tokens, "steps": 100}}
        values = {"batch": BATCH, "schedule": tokens, "steps": 200}
        assert Continuing(build(TrainConfig, values), 16).usable(extra) == usable


@pytest.mark.parametrize(("settings", "message"), [
    ({"decay_steps": 5, "decay_fraction": 0.2}, "both given"),
    ({"decay_tokens": 5}, "unit is steps: give decay_steps"),
    ({"decay_form": "exponential", "final_fraction": 0}, "never reaches"),
    ({"warmup_fraction": 0.01, "warmup_steps": 10}, "warmup_fraction and warmup_steps are both given")])
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build(TrainConfig, {"schedule": {"kind": "wsd", **settings}})


def test_the_newest_checkpoint_before_the_decay_is_kept():
    infos = [CheckpointInfo(f"step_{step:08d}", step, True, True, 1, 1, "", before_decay=step <= 20)
             for step in (10, 20, 30, 40)]
    assert Keep(1).names(infos) == {"step_00000020", "step_00000040"}
    assert Keep(1).names(infos[:2]) == {"step_00000020"}
