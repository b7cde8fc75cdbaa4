"""Tests of runs with bad steps: skipped or rolled back, recorded, and the same after restarts and resizes.

The fault is planted: wherever certain sequences are in a batch, its loss and gradient come out wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.shards.test_integrity import flip
from tests.unit.train.helpers import Replaced, config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.elastic.trainer import LocalControl, fit_local
from tidewheel.errors import CheckpointError, ConfigError, ShardError
from tidewheel.jsonlog import JsonLog
from tidewheel.shards.manifest import read_manifest
from tidewheel.shards.source import Source
from tidewheel.train import batches, checks, trace
from tidewheel.train.audit import audit
from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.parallel import ParallelModel, local
from tidewheel.train.positions import Positions
from tidewheel.train.runtime import Runtime

MARK = 120
STEPS = 12
BASE = (f"steps={STEPS}", "data.validation=''", "evaluation.sample_tokens=0", "guards.window=8",
        "checkpoint.every_steps=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("bad")
    write_shards(base / "shards", rows=60)
    return base


def sequences(folder: Path, step: int) -> list[str]:
    """Return the sequences that an undisturbed run reads at `step`."""
    source = Source.single(str(folder / "shards"), read_manifest(storage.store(folder / "shards")), 7)
    return source.ids((step - 1) * 8, 8)


def plant(wrong: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    """Give batches with a sequence of `wrong` a loss that is not a number ("nan") or jumps ("spike")."""
    real_batch, real_step = batches.micro_batch, ParallelModel.forward_backward

    def micro_batch(rows: Any, part: slice, *rest: Any, **options: Any) -> Any:
        micro = real_batch(rows, part, *rest, **options)
        kinds = [wrong.get(name, "") for name in rows.ids[part]]
        micro.tokens[[kind == "nan" for kind in kinds], 0] = MARK
        micro.tokens[[kind == "spike" for kind in kinds], 0] = MARK + 1
        return micro

    def forward_backward(self: ParallelModel, micros: Any, *rest: Any, **options: Any) -> torch.Tensor:
        losses = real_step(self, micros, *rest, **options)
        for number, micro in enumerate(micros):
            factor = math.nan if (micro.tokens == MARK).any() else 50.0 if (micro.tokens == MARK + 1).any() else 1.0
            if factor != 1.0:
                losses[number] *= factor
                for parameter in self.parameters():
                    local(parameter.grad).mul_(factor)
        return losses

    patch.setattr(batches, "micro_batch", micro_batch)
    patch.setattr(ParallelModel, "forward_backward", forward_backward)


@pytest.fixture
def planted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Plant a non-finite loss in the third sequence that step 6 of an undisturbed run reads, and yield its id."""
    name = sequences(folder, 6)[2]
    plant({name: "nan"}, monkeypatch)
    return name


def log(settings: TrainConfig, name: str) -> list[dict]:
    return jsonlog.read(storage.store(settings.run_uri), name)


def events(settings: TrainConfig, kind: str) -> list[dict]:
    return [event["detail"] for event in log(settings, "events.jsonl") if event["kind"] == kind]


def weights(settings: TrainConfig) -> dict[str, np.ndarray]:
    """Return the weights in the files of the newest checkpoint."""
    from safetensors.numpy import load_file

    checkpoints = storage.store(settings.run_uri).child("checkpoints")
    newest = list_checkpoints(checkpoints)[-1].name
    return {f"{name}": value for path in sorted(Path(str(checkpoints.local_path(newest))).glob("*.safetensors"))
            for name, value in load_file(path).items()}


def assert_same(one: TrainConfig, other: TrainConfig, tolerance: float = 0.0) -> None:
    losses = [{line["step"]: line["loss"] for line in log(run, "metrics.jsonl")} for run in (one, other)]
    assert losses[0] == pytest.approx(losses[1], abs=tolerance)
    if not tolerance:
        mine, theirs = weights(one), weights(other)
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


def stopped(settings: TrainConfig, after: int) -> None:
    """Run until the worker is killed after a step."""
    def die(progress: dict[str, Any]) -> None:
        if progress["step"] == after:
            raise Replaced

    with pytest.raises(Replaced):
        fit_local(settings, on_progress=die)


def test_a_bad_step_is_skipped(folder: Path, planted: str):
    whole, killed = (config(folder, name, *BASE) for name in ("skip", "skip-killed"))
    fit_local(whole)
    [guard_event] = events(whole, "guard")
    record = {line["step"]: line for line in log(whole, "batches.jsonl")}[6]
    assert {key: guard_event[key] for key in ("step", "reason", "action", "loss", "position", "count", "digest")} == {
        "step": 6, "reason": "non-finite loss", "action": "skip", "loss": "nan", "position": 40, "count": 8,
        "digest": record["digest"]}
    metrics = {line["step"]: line for line in log(whole, "metrics.jsonl")}
    assert metrics[6]["loss"] is None
    assert all(math.isfinite(metrics[step]["loss"]) for step in metrics if step != 6)
    assert audit(whole.run_uri).ok

    traced = trace.trace_step(whole.run_uri, 6)
    assert planted in [sequence["id"] for sequence in traced["sequences"]]
    assert traced["guards"] == [guard_event]
    assert "guard: non-finite loss at step 6 (loss nan" in "\n".join(trace.step_lines(traced))

    stopped(killed, after=9)  # the checkpoint of step 8 has the window and the number of updates
    fit_local(killed)
    assert_same(killed, whole)


def test_a_bad_step_is_rolled_back(folder: Path, planted: str):
    settings = config(folder, "back", *BASE, "guards.non_finite=rollback")
    fit_local(settings)
    assert [(detail["step"], detail["action"]) for detail in events(settings, "guard")] == [(6, "rollback")]
    assert events(settings, "rollback") == [{"step": 6, "back_to": 4, "position": 40, "count": 8,
                                             "reason": "non-finite loss"}]
    audited = audit(settings.run_uri)
    assert audited.ok, audited.summary()
    assert (audited.steps, audited.records, audited.redone, audited.passed_over) == (STEPS, STEPS + 2, 2, 8)
    assert "but 8 that guards passed over on purpose" in audited.summary()

    traced = trace.trace_step(settings.run_uri, 6)
    assert traced["as_recorded"]
    assert planted not in [sequence["id"] for sequence in traced["sequences"]]
    [before] = traced["before"]
    assert before["as_recorded"]
    assert [sequence["id"] for sequence in before["sequences"]] == sequences(folder, 6)
    assert "passed over since" in "\n".join(trace.step_lines(traced))
    document = before["sequences"][2]["segments"][0]["document"]
    assert trace.trace_document_steps(settings.run_uri, document)["steps"] == []

    # equals a run that skips these sequences from the start and has no fault
    known = config(folder, "known", *BASE, "guards.non_finite=rollback")
    storage.store(known.run_uri).write("passed_over.jsonl", (Path(settings.run_uri) / "passed_over.jsonl").read_bytes())
    fit_local(known)
    assert not events(known, "guard")
    assert_same(settings, known)


def test_a_rolled_back_killed_and_resized_run_is_audited(folder: Path, planted: str):
    """One of two ranks reads the bad sequence; then one process continues, and the run is audited."""
    settings = config(folder, "resized", *BASE, "guards.non_finite=rollback")
    on_ranks(2, part_of_two, settings, planted)
    assert [(detail["step"], detail["action"]) for detail in events(settings, "guard")] == [(6, "rollback")]
    fit_local(settings)
    audited = audit(settings.run_uri)
    assert audited.ok, audited.summary()
    assert (audited.world_sizes, audited.passed_over, audited.steps) == ((2, 1), 8, STEPS)
    reference = config(folder, "resized-alone", *BASE, "guards.non_finite=rollback")
    fit_local(reference)
    assert_same(settings, reference, tolerance=1e-4)


def part_of_two(settings: TrainConfig, name: str) -> None:
    """Run two gloo ranks until they are killed after step 9."""
    def die(progress: dict[str, Any]) -> None:
        if progress["step"] == 9:
            raise Replaced

    with pytest.MonkeyPatch.context() as patch:
        plant({name: "nan"}, patch)
        rank, run_store = dist.get_rank(), storage.store(settings.run_uri)
        control = LocalControl(JsonLog(run_store, "events.jsonl"), die)
        manager = CheckpointManager(run_store.child("checkpoints"), asynchronous=False)
        with pytest.raises((Replaced, RuntimeError)):  # the collective of the remaining rank fails
            train(settings, Runtime(rank, 2, checkpoints=manager, control=control))


def test_a_spike_is_rolled_back_with_the_batches_before_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    plant({sequences(folder, 11)[5]: "spike"}, monkeypatch)
    ignored = config(folder, "ignored", *BASE)
    fit_local(ignored)
    [guard_event] = events(ignored, "guard")
    assert (guard_event["step"], guard_event["reason"], guard_event["action"]) == (11, "loss spike", "ignore")
    assert guard_event["loss_z"] > 6
    settings = config(folder, "spike", *BASE, "guards.spike=rollback", "guards.pass_over=2")
    fit_local(settings)
    assert log(settings, "passed_over.jsonl")[0].items() >= {"step": 11, "back_to": 8, "start": 72, "end": 88}.items()
    audited = audit(settings.run_uri)
    assert audited.ok, audited.summary()
    assert audited.passed_over == 16


def test_before_the_first_checkpoint_a_run_rolls_back_to_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch):
    plant({sequences(folder, 2)[0]: "nan", sequences(folder, 3)[0]: "nan"}, monkeypatch)
    settings = config(folder, "early", *BASE, "guards.non_finite=rollback")
    fit_local(settings)
    assert [line["back_to"] for line in log(settings, "passed_over.jsonl")] == [0, 0]
    audited = audit(settings.run_uri)
    assert audited.ok, audited.summary()
    assert audited.passed_over == 16


@pytest.mark.parametrize(("overrides", "says"), [
    (("guards.non_finite=stop",), "non-finite loss at step 6"),
    (("guards.non_finite=rollback", "guards.max_rollbacks=1"), "after 1 rollbacks, guards.max_rollbacks is 1"),
    (("guards.max_skips=1",), "2 steps in a row without an update up to step 7")])
def test_a_limit_of_bad_steps_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...],
                                           says: str):
    plant({sequences(folder, 6)[0]: "nan", sequences(folder, 7)[0]: "nan"}, monkeypatch)
    settings = config(folder, f"enough{len(says)}", *BASE, *overrides)
    with pytest.raises(ConfigError, match=says) as caught:
        fit_local(settings)
    assert caught.value.fix
    assert events(settings, "guard")[-1]["step"] in (6, 7)


def test_a_checkpoint_of_a_history_that_was_given_up_is_refused():
    now, settings = Positions(BatchSizes({"global_sequences": 8}, 1), [(40, 48), (16, 24)]), config(Path("nowhere"))
    for extra in ({"step": 4, "position": 32, "passed_over": []}, {"step": 6, "position": 48, "passed_over": []},
                  {"step": 2, "position": 16, "passed_over": [[0, 8]]}):
        with pytest.raises(CheckpointError, match="undone"):
            checks.same_history(extra, now, settings)
    for extra in ({"step": 2, "position": 16}, {"step": 6, "position": 64, "passed_over": [[40, 48], [16, 24]]}):
        checks.same_history(extra, now, settings)


def test_a_shard_that_turns_bad_stops_the_run_and_leaves_nothing(folder: Path, tmp_path: Path):
    """Bytes flip in all shards during the run. The run stops at the shard without a checkpoint of it. With the shards
    fixed it continues to the result of an undisturbed run."""
    import shutil

    shutil.copytree(folder / "shards", tmp_path / "shards")
    settings = config(tmp_path, "turned", *BASE)
    files = sorted((tmp_path / "shards").glob("*.arrow"))

    def damage(progress: dict[str, Any]) -> None:
        if progress["step"] == 5:
            for file in files:
                flip(file)

    with pytest.raises(ShardError, match="not what its manifest says") as caught:
        fit_local(settings, on_progress=damage)
    assert Path(caught.value.where).name in [file.name for file in files]
    checkpoints = list_checkpoints(storage.store(settings.run_uri).child("checkpoints"))
    assert max(checkpoint.step for checkpoint in checkpoints) == 4
    with pytest.raises(ShardError, match="not what its manifest says"):  # the next start raises before any step
        fit_local(settings)
    for file in files:
        flip(file)
    fit_local(settings)
    undisturbed = config(folder, "undisturbed", *BASE)
    fit_local(undisturbed)
    assert_same(settings, undisturbed)
    assert audit(settings.run_uri).ok


def test_the_metrics_are_json(folder: Path):
    """No file of the run that other programs may read contains NaN."""
    files = list((folder / "runs").glob("*/*.jsonl"))
    assert files
    for line in "".join(file.read_text() for file in files).splitlines():
        json.loads(line, parse_constant=pytest.fail)
