"""The manager in one process: it saves, verifies, refuses damage, retains checkpoints and survives failing stores."""

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.unit.checkpoint.helpers import Events, FlakyStore, clear, equal, manager, state
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.retention import Keep, expired
from tidewheel.checkpoint.staging import Stage
from tidewheel.checkpoint.verify import CheckpointInfo, list_checkpoints, verify_checkpoint
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import CheckpointError
from tidewheel.storage import LocalStore, Store, store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        running.create_bucket("bucket")
        yield running


@pytest.fixture(params=["local", "s3"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return store(tmp_path / "checkpoints")
    request.getfixturevalue("server")
    return store(f"s3://bucket/{uuid.uuid4().hex}/checkpoints")


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    folder = store(tmp_path / "checkpoints")
    assert isinstance(folder, LocalStore)
    return folder


def saved(target: Store, *steps: int, **options: Any) -> Events:
    """Save `state(step)` for each of `steps` and return the events."""
    events = Events()
    saver = manager(target, events, **options)
    for step in steps:
        saver.save(step, state(step), {"step": step})
    saver.wait()
    return events


def restored(target: Store) -> tuple[dict[str, Any] | None, dict, Events]:
    """Load the newest checkpoint with a new manager and return its extra values, the state and the events."""
    events, values = Events(), state(999)
    return manager(target, events).load_latest(values), values, events


def test_a_saved_checkpoint_is_loaded(target: Store):
    assert restored(target)[0] is None
    events = saved(target, 100, 200)
    assert [(kind, detail["step"]) for kind, detail in events] == [("commit", 100), ("commit", 200)]
    assert {"checkpoint", "seconds", "bytes", "stall_seconds", "files"} <= set(events[0][1])
    extra, values, load_events = restored(target)
    assert extra == {"step": 200}
    assert equal(values, state(200))
    assert load_events == []
    infos = list_checkpoints(target)
    assert [(info.name, info.step, info.complete, info.world_size) for info in infos] == [
        ("step_00000100", 100, True, 1), ("step_00000200", 200, True, 1)]
    assert infos[1].bytes > events[1][1]["bytes"]
    assert verify_checkpoint(target, "step_00000200") == []


def test_the_files_are_safetensors_and_json_not_pickle(local: LocalStore):
    saved(local, 1)
    folder = local.root / "step_00000001"
    [data] = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", data.name]
    expected = {f"{group}/{name}": tensor for group, tensors in state(1).items() for name, tensor in tensors.items()}
    with safe_open(data, "pt") as file:
        assert sorted(file.keys()) == sorted(expected)
        for name, tensor in expected.items():
            assert torch.equal(file.get_tensor(name), tensor)
    manifest = read_manifest(local, "step_00000001")
    raw = data.read_bytes()
    (chunk,) = manifest.chunks("model/wide")
    start = chunk.start
    assert raw[start:start + 96] == expected["model/wide"].numpy().tobytes()


def test_a_save_holds_the_state_at_its_call(local: LocalStore, monkeypatch: pytest.MonkeyPatch):
    """Training changes the tensors in place before the upload has begun."""
    gate = threading.Event()
    writer = LocalStore.writer
    monkeypatch.setattr(LocalStore, "writer", lambda self, key: gate.wait(120) and writer(self, key))
    saver, values, extra = manager(local), state(7), {"list": [1]}
    began = time.monotonic()
    saver.save(7, values, extra)
    saver.settle()
    assert time.monotonic() - began < 60
    clear(values)
    extra["list"].append(2)
    gate.set()
    saver.wait()
    loaded_extra, loaded, _ = restored(local)
    assert loaded_extra == {"list": [1]}
    assert equal(loaded, state(7))


def test_the_copy_is_made_in_the_background_and_training_can_wait(local: LocalStore, monkeypatch: pytest.MonkeyPatch):
    gate, copy = threading.Event(), Stage.copy

    def slow(*arguments: Any) -> dict[str, torch.Tensor]:
        assert gate.wait(60)
        return copy(*arguments)

    monkeypatch.setattr(Stage, "copy", slow)
    saver, values = manager(local), state(7)
    saver.save(7, values, {})
    timer = threading.Timer(0.3, gate.set)
    timer.start()
    saver.settle()
    assert gate.is_set()
    clear(values)
    saver.wait()
    assert equal(restored(local)[1], state(7))
    assert saver.saves().stall_seconds > 0.2


def test_a_copy_that_fails_is_a_failed_save(local: LocalStore, monkeypatch: pytest.MonkeyPatch):
    def none(*_: Any) -> None:
        raise MemoryError("no memory for the copy")

    monkeypatch.setattr(Stage, "copy", none)
    events = Events()
    saver = manager(local, events)
    saver.save(1, state(1), {})
    saver.settle()
    saver.wait()
    assert saver.saves().failed == 1
    assert "no memory for the copy" in events.of("save_failed")[0]["reason"]


def test_a_second_save_waits_for_the_first(local: LocalStore, monkeypatch: pytest.MonkeyPatch):
    writer = LocalStore.writer
    monkeypatch.setattr(LocalStore, "writer", lambda self, key: time.sleep(0.5) or writer(self, key))
    events = saved(local, 1, 2)
    assert [detail["step"] for detail in events.of("commit")] == [1, 2]
    assert events.of("commit")[1]["stall_seconds"] > 0.2
    assert equal(restored(local)[1], state(2))
    assert verify_checkpoint(local, "step_00000001") == []


def _data_file(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.suffix == ".safetensors")


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def _flip_digit(folder: Path) -> None:
    """Change the step count so that the file is still JSON."""
    path = folder / "manifest.json"
    text = path.read_text()
    assert '"extra": {"step": 200}' in text
    path.write_text(text.replace('"extra": {"step": 200}', '"extra": {"step": 900}'))


DAMAGE = {
    "byte flipped in a tensor": (lambda folder: _flip(_data_file(folder), -1), "hash differs"),
    "byte flipped in the head": (lambda folder: _flip(_data_file(folder), 40), "hash differs"),
    "truncated": (lambda folder: _data_file(folder).write_bytes(_data_file(folder).read_bytes()[:-8]),
                  "bytes, expected"),
    "file missing": (lambda folder: _data_file(folder).unlink(), "missing"),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "not committed"),
    "manifest truncated": (lambda folder: (folder / "manifest.json").write_bytes(
        (folder / "manifest.json").read_bytes()[:-30]), "damaged"),
    "manifest empty": (lambda folder: (folder / "manifest.json").write_bytes(b""), "damaged"),
    "manifest not text": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\x00"), "damaged"),
    "manifest changed": (_flip_digit, "hash"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_detected_and_the_previous_checkpoint_is_used(damage: str, local: LocalStore):
    saved(local, 100, 200)
    act, reason = DAMAGE[damage]
    act(local.root / "step_00000200")
    extra, values, events = restored(local)
    assert extra == {"step": 100}
    assert equal(values, state(100))
    [(kind, detail)] = events
    assert (kind, detail["checkpoint"]) == ("checkpoint_refused", "step_00000200")
    assert reason in detail["reason"]
    problems = verify_checkpoint(local, "step_00000200")
    assert len(problems) == 1
    assert reason in problems[0]


def test_every_flipped_byte_is_noticed(local: LocalStore):
    saved(local, 1)
    folder = local.root / "step_00000001"
    random = np.random.default_rng(0)
    for path in (folder / "manifest.json", _data_file(folder)):
        whole = path.read_bytes()
        for at in random.choice(len(whole), 60, replace=False).tolist():
            _flip(path, at)
            assert verify_checkpoint(local, "step_00000001"), (path.name, at)
            path.write_bytes(whole)
    assert verify_checkpoint(local, "step_00000001") == []


def test_a_partial_folder_is_skipped_and_collected_later(local: LocalStore):
    saved(local, 100)
    local.write("step_00000200/rank_00000-dead.safetensors", b"half")
    extra, _, events = restored(local)
    assert extra == {"step": 100}
    assert events.of("checkpoint_refused")[0]["checkpoint"] == "step_00000200"
    assert [info.complete for info in list_checkpoints(local)] == [True, False]
    saved(local, 150)
    assert len(list_checkpoints(local)) == 3  # newer than step 150: it may belong to another writer
    saved(local, 200)  # the same step again: committed beside the partial files
    assert restored(local)[0] == {"step": 200}
    saved(local, 250)
    assert not local.exists("step_00000200/rank_00000-dead.safetensors")
    assert [info.step for info in list_checkpoints(local) if info.complete] == [150, 200, 250]


def test_a_run_with_only_partial_checkpoints_starts_anew(local: LocalStore):
    local.write("step_00000100/rank_00000-dead.safetensors", b"half")
    extra, values, events = restored(local)
    assert extra is None
    assert equal(values, state(999))
    assert len(events.of("checkpoint_refused")) == 1


def test_a_run_without_an_intact_checkpoint_is_an_error(local: LocalStore):
    saved(local, 100, 200)
    for step in (100, 200):
        _flip(_data_file(local.root / f"step_{step:08d}"), -1)
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is intact") as caught:
        restored(local)
    assert caught.value.fix
    assert local.uri in caught.value.where


def test_saving_a_damaged_step_again_repairs_it(local: LocalStore):
    saved(local, 100, 200)
    _flip(_data_file(local.root / "step_00000200"), -1)
    saver, values = manager(local), state(0)
    assert saver.load_latest(values) == {"step": 100}
    saver.save(200, state(200), {"step": 200})
    saver.wait()
    assert verify_checkpoint(local, "step_00000200") == []
    assert restored(local)[0] == {"step": 200}


def test_an_intact_step_saved_again_is_never_without_a_valid_manifest(local: LocalStore):
    saved(local, 100)
    before = read_manifest(local, "step_00000100").files
    flaky = FlakyStore(local.root, failures=99, part="manifest.json")
    events = Events()
    saver = manager(flaky, events)
    saver.save(100, state(5), {})
    saver.wait()
    assert events.of("save_failed")
    assert read_manifest(local, "step_00000100").files == before
    assert equal(restored(local)[1], state(100))


@pytest.mark.parametrize("keep_last", [1, 2, 5])
def test_only_the_last_checkpoints_are_kept(keep_last: int, local: LocalStore):
    saved(local, *range(10, 60, 10), keep_last=keep_last)
    assert [info.step for info in list_checkpoints(local)] == list(range(10, 60, 10))[-keep_last:]
    assert sorted(path.name for path in local.root.iterdir()) == [info.name for info in list_checkpoints(local)]


def test_retention_does_not_count_damaged_checkpoints(local: LocalStore):
    """With keep_last=1 and a damaged newest checkpoint, the intact one outlives the next save of a lower step."""
    saved(local, 100, keep_last=5)
    saved(local, 200, keep_last=5)
    _flip(_data_file(local.root / "step_00000200"), -1)
    saver = manager(local, keep_last=1)
    assert saver.load_latest(state(0)) == {"step": 100}
    saver.save(150, state(150), {"step": 150})
    saver.wait()
    assert restored(local)[0] == {"step": 150}
    saver.save(250, state(250), {"step": 250})
    saver.wait()
    assert [info.step for info in list_checkpoints(local)] == [250]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("part", [".safetensors", "manifest.json"])
def test_a_save_that_keeps_failing_is_reported_and_training_continues(part: str, asynchronous: bool, tmp_path: Path):
    flaky = FlakyStore(tmp_path, part=part)
    saver = manager(flaky, events := Events(), asynchronous=asynchronous)
    saver.save(1, state(1), {"step": 1})
    saver.wait()
    flaky.failures = 1
    saver.save(2, state(2), {"step": 2})
    saver.wait()
    [failed] = events.of("save_failed")
    assert failed["step"] == 2
    assert "the object store failed" in failed["reason"]
    assert restored(flaky)[0] == {"step": 1}
    saver.save(3, state(3), {"step": 3})
    saver.wait()
    assert restored(flaky)[0] == {"step": 3}
    assert [info.step for info in list_checkpoints(flaky)] == [1, 3]


def test_a_state_that_does_not_fit_is_refused(local: LocalStore):
    saved(local, 1)
    unfitting = state(1)
    unfitting["model"]["new"] = torch.zeros(2)
    unfitting["model"]["wide"] = torch.zeros(3, 2, 5)
    unfitting["optimizer"]["half"] = torch.zeros(6)
    with pytest.raises(CheckpointError) as caught:
        manager(local).load_latest(unfitting)
    for words in ("model/new is not in the checkpoint", "model/wide", "optimizer/half is bfloat16"):
        assert words in caught.value.what
    part = {"model": {"wide": torch.zeros(3, 2, 4)}}
    assert manager(local).load_latest(part) == {"step": 1}
    assert torch.equal(part["model"]["wide"], state(1)["model"]["wide"])


def test_values_that_cannot_be_saved_are_refused(local: LocalStore):
    saver = manager(local)
    with pytest.raises(CheckpointError, match="model/a is int"):
        saver.save(1, {"model": {"a": 3}}, {})
    with pytest.raises(CheckpointError, match="JSON"):
        saver.save(1, state(1), {"a": object()})
    with pytest.raises(CheckpointError, match="two tensors"):
        saver.save(1, {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, {})
    assert list_checkpoints(local) == []


def test_parameters_with_gradients_and_odd_strides_are_restored(local: LocalStore):
    values = {"model": {"w": torch.nn.Parameter(torch.arange(12.0).reshape(3, 4)),
                        "t": torch.arange(6).reshape(2, 3).T}}
    saver = manager(local)
    saver.save(1, values, {})
    saver.wait()
    fresh = {"model": {"w": torch.nn.Parameter(torch.zeros(3, 4)), "t": torch.zeros(2, 3, dtype=torch.int64).T}}
    assert manager(local).load_latest(fresh) == {}
    assert equal(values, fresh)
    assert fresh["model"]["w"].requires_grad


def test_a_missing_checkpoint_is_refused(local: LocalStore):
    for name in ("step_00000009", "../x", ""):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            verify_checkpoint(local, name)


def test_the_best_and_every_nth_outlive_the_newest(local: LocalStore):
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: 4.0, 60: float("nan")}
    saver = manager(local, keep_last=1, keep_best=2, keep_every=40)
    for step, loss in losses.items():
        saver.save(step, state(step), {"step": step, "validation_loss": loss})
        saver.wait()
    assert [info.step for info in list_checkpoints(local)] == [20, 30, 40, 60]
    with pytest.raises(ValueError, match="keep_last is at least 1"):
        manager(local, keep_last=0)


@given(st.lists(st.tuples(st.booleans(), st.none() | st.floats(0, 9)), min_size=1, max_size=12),
       st.integers(1, 4), st.integers(0, 4), st.integers(0, 5))
def test_the_newest_intact_one_is_never_deleted(made, last, best, every):
    infos = [CheckpointInfo(f"step_{step:08d}", step, complete, complete, 1, 1, "" if complete else "partial", loss)
             for step, (complete, loss) in enumerate(made, 1)]
    plan = expired(infos, committed=len(infos), keep=Keep(last, best, every))
    intact = [info.name for info in infos if info.complete]
    assert not set(intact[-last:]) & set(plan.checkpoints)
    remaining = [info for info in infos if info.complete and info.name not in plan.checkpoints]
    assert all(info in remaining for info in infos if info.complete and every and info.step % every == 0)
    scored = sorted(info.validation_loss for info in infos if info.complete and info.validation_loss is not None)
    held = sorted(info.validation_loss for info in remaining if info.validation_loss is not None)
    assert held[:best] == scored[:best]
