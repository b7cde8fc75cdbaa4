"""Checkpoints: what is saved comes back, on any number of ranks; what is damaged is never used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.ranks import on_ranks
from tidewheel.checkpoint import manager as manager_module
from tidewheel.checkpoint.manager import CheckpointManager, flatten
from tidewheel.checkpoint.manifest import checkpoint_name, read_checkpoint_manifest
from tidewheel.checkpoint.retention import expired
from tidewheel.checkpoint.verify import CheckpointInfo, list_checkpoints, verify_checkpoint
from tidewheel.errors import CheckpointError, StorageError
from tidewheel.storage import store


def state(value: float = 0.0) -> dict:
    generator = torch.Generator().manual_seed(7)
    return {"model": {"w": torch.randn(5, 3, generator=generator) + value, "b": torch.full((3,), value)},
            "optimizer": {"w.exp_avg": torch.randn(5, 3, generator=generator) * value,
                          "half": torch.full((2, 2), value, dtype=torch.bfloat16), "none": torch.empty(0, 3)}}


def same(a: dict, b: dict) -> bool:
    a, b = flatten(a), flatten(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def events():
    return []


@pytest.fixture
def manager(tmp_path, events):
    made = CheckpointManager(store(tmp_path), keep_last=2, on_event=lambda kind, detail: events.append((kind, detail)))
    yield made
    made.close()


def kinds(events) -> list[str]:
    return [kind for kind, _ in events]


def test_nothing_saved_is_none(manager):
    assert manager.load_latest(state()) is None


def test_round_trip_with_extra(manager, events):
    manager.save(3, state(1.5), {"step": 3, "note": "é"})
    manager.wait()
    found = state()
    assert manager.load_latest(found) == {"step": 3, "note": "é"}
    assert same(found, state(1.5))
    assert kinds(events) == ["commit"]
    assert events[0][1]["bytes"] > 0


def test_later_steps_do_not_reach_the_copy(manager):
    live = state(1.0)
    manager.save(1, live, {"step": 1})
    for tensor in flatten(live).values():
        tensor.zero_()  # the next optimizer step, while the upload may still be running
    manager.wait()
    found = state()
    manager.load_latest(found)
    assert same(found, state(1.0))


def test_only_tensors_are_saved(manager):
    with pytest.raises(TypeError, match="extra"):
        manager.save(1, {"model": {"lr": 0.1}}, {})


def test_the_newest_are_kept(manager, tmp_path):
    for step in (1, 2, 3, 4):
        manager.save(step, state(step), {"step": step})
    manager.wait()
    assert [info.step for info in list_checkpoints(store(tmp_path))] == [3, 4]


def file_of(folder: Path) -> Path:
    return next(path for path in sorted(folder.iterdir()) if path.suffix == ".safetensors")


def flip_data(folder: Path) -> None:
    path = file_of(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 1', 1))


def truncate(folder: Path) -> None:
    path = file_of(folder)
    path.write_bytes(path.read_bytes()[:-1])


def climb(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"key": "rank', '"key": "../rank', 1))


DAMAGE = {
    "one bit of a shard": flip_data, "a shard is shorter": truncate, "a shard is gone": lambda f: file_of(f).unlink(),
    "no manifest": lambda f: (f / "manifest.json").unlink(), "another manifest": flip_manifest,
    "half a manifest": lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text()[:99]),
    "an empty manifest": lambda f: (f / "manifest.json").write_text(""), "a path that climbs out": climb,
    "a stale manifest": lambda f: (f / "manifest.json").write_bytes((f.parent / "step_00000001/manifest.json")
                                                                   .read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(damage, manager, tmp_path, events):
    for step in (1, 2):
        manager.save(step, state(step), {"step": step})
    manager.wait()
    damage(tmp_path / checkpoint_name(2))
    assert verify_checkpoint(store(tmp_path), checkpoint_name(2))
    found = state()
    assert manager.load_latest(found) == {"step": 1}
    assert same(found, state(1))
    refused = [detail for kind, detail in events if kind == "checkpoint_refused"]
    assert len(refused) == 1
    assert refused[0]["checkpoint"] == checkpoint_name(2)
    assert refused[0]["reason"]


def test_none_intact_is_an_error_and_not_a_fresh_start(manager, tmp_path):
    manager.save(1, state(1), {"step": 1})
    manager.wait()
    flip_data(tmp_path / checkpoint_name(1))
    with pytest.raises(CheckpointError, match="none of the 1"):
        manager.load_latest(state())


def test_a_partial_one_alone_is_a_fresh_start(manager, tmp_path):
    store(tmp_path).write("step_00000005/rank_00000-dead.safetensors", b"half")
    assert manager.load_latest(state()) is None


def test_the_same_step_again_replaces_what_a_killed_save_left(manager, tmp_path):
    store(tmp_path).write("step_00000005/rank_00000-dead.safetensors", b"half")
    manager.save(5, state(5), {"step": 5})
    manager.wait()
    assert not (tmp_path / "step_00000005/rank_00000-dead.safetensors").exists()
    assert verify_checkpoint(store(tmp_path), "step_00000005") == []
    manager.save(5, state(6), {"step": 5})  # redone after a restart
    manager.wait()
    found = state()
    manager.load_latest(found)
    assert same(found, state(6))


def test_another_model_is_explained(manager):
    manager.save(1, state(1), {})
    manager.wait()
    other = state()
    other["model"]["w"] = torch.zeros(6, 3)
    other["model"]["new"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"lacks model/new.*other shapes for model/w"):
        manager.load_latest(other)


def test_a_failing_store_is_tried_again_then_reported(tmp_path, events, monkeypatch):
    monkeypatch.setattr(manager_module, "LONGEST_WAIT_SECONDS", 0.01)
    place = store(tmp_path)
    made = CheckpointManager(place, on_event=lambda kind, detail: events.append((kind, detail)))
    made.save(1, state(1), {"step": 1})
    made.wait()
    (tmp_path / checkpoint_name(2)).write_text("a file where the folder should be")
    made.save(2, state(2), {"step": 2})
    made.wait()
    assert kinds(events) == ["commit", "save_failed"]
    assert made.load_latest(state()) == {"step": 1}
    made.close()


def test_a_store_that_recovers_loses_nothing(tmp_path, events):
    failures = iter([StorageError("down"), StorageError("down")])

    def flaky():
        error = next(failures, None)
        if error:
            raise error
        return "done"

    assert manager_module._with_retries(flaky) == "done"


def test_retention_never_takes_the_newest_or_what_is_being_written():
    def info(step, complete=True):
        return CheckpointInfo(checkpoint_name(step), step, complete, "", 1, 1)

    found = [info(1), info(2, False), info(3), info(4), info(9, False)]
    assert expired(found, 4, 1) == [checkpoint_name(step) for step in (1, 2, 3)]
    assert expired(found, 4, 99) == [checkpoint_name(2)]


def test_manifest_is_json_that_safetensors_agrees_with(manager, tmp_path):
    from safetensors.torch import load_file

    manager.save(1, state(2), {})
    manager.wait()
    tensors = load_file(file_of(tmp_path / checkpoint_name(1)))  # an oracle we did not write
    assert torch.equal(tensors["model/w@0,0"], state(2)["model"]["w"])
    assert torch.equal(tensors["optimizer/half@0,0"], state(2)["optimizer"]["half"])
    json.loads((tmp_path / checkpoint_name(1) / "manifest.json").read_text())
    assert read_checkpoint_manifest(store(tmp_path / checkpoint_name(1))).step == 1


# -- several ranks ---------------------------------------------------------------------------------
def sharded(value: float) -> dict:
    """`state` with every tensor sharded over the ranks: 5 rows on 2 or 3 ranks are uneven shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = state(value)
    return {group: {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
                    for name, tensor in tensors.items()} for group, tensors in whole.items()}


def save_sharded(folder: str) -> None:
    made = CheckpointManager(store(folder))
    for step in (1, 2):
        made.save(step, sharded(step), {"step": step})
    made.close()


def load_sharded(folder: str, expected: int) -> None:
    refused: list[str] = []
    made = CheckpointManager(store(folder), on_event=lambda kind, detail: refused.append(kind))
    found = sharded(0.0)
    assert made.load_latest(found) == {"step": expected}
    for group, tensors in sharded(float(expected)).items():
        for name, tensor in tensors.items():
            assert isinstance(found[group][name], DTensor)
            assert torch.equal(found[group][name].to_local(), tensor.to_local()), name
    assert dist.get_rank() or len(refused) == 2 - expected
    made.close()


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 3)])
def test_reshards_to_any_number_of_ranks(writers, readers, tmp_path):
    on_ranks(writers, save_sharded, str(tmp_path))
    on_ranks(readers, load_sharded, str(tmp_path), 2)


def test_all_ranks_agree_on_the_fallback(tmp_path):
    on_ranks(2, save_sharded, str(tmp_path))
    flip_data(tmp_path / checkpoint_name(2))
    on_ranks(2, load_sharded, str(tmp_path), 1)
    found = state()
    assert CheckpointManager(store(tmp_path)).load_latest(found) == {"step": 1}
    assert same(found, state(1))
