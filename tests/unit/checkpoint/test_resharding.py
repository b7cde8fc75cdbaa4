"""Checkpoints on several gloo ranks: any number reads what any other wrote, and all agree on what is intact."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.ranks import on_ranks
from tests.unit.checkpoint.helpers import Events, FlakyStore, clear, equal, manager, state
from tests.unit.checkpoint.test_digest import expected
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.verify import list_checkpoints, verify_checkpoint
from tidewheel.storage import store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(root: Path, step: int) -> None:
    """Save `state(step)`, then clear the tensors as soon as they may change."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values, events = state(step, mesh), Events()
    saver = manager(store(root), events)
    saver.save(step, values, {"step": step})
    saver.settle()
    clear(values)
    saver.wait()
    assert [kind for kind, _ in events] == ["commit"] * (dist.get_rank() == 0)


def load(root: Path, step: int, refused: int = 0) -> None:
    """Assert that all ranks load `state(step)`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values, events = state(999, mesh), Events()
    extra = manager(store(root), events).load_latest(values)
    assert extra == {"step": step}
    assert equal(values, state(step, mesh))
    assert len(events.of("checkpoint_refused")) == refused * (dist.get_rank() == 0)


def load_all_and_save(root: Path, steps: tuple[int, ...]) -> None:
    """Load what each number of ranks in `steps` saved, oldest first, then save at a step equal to the world size."""
    for step in steps:
        load(root / f"by_{step}", step)
    save(root / f"by_{dist.get_world_size()}", dist.get_world_size())


def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path: Path):
    """Tensors of 7, 5, 1 and 3 rows give uneven parts, and ranks without rows."""
    saver = manager(store(tmp_path / "by_1"))
    saver.save(1, state(1), {"step": 1})
    saver.wait()
    on_ranks(2, load_all_and_save, tmp_path, (1,))
    on_ranks(3, load_all_and_save, tmp_path, (1, 2))
    on_ranks(2, load, tmp_path / "by_3", 3)
    for ranks in (2, 3):
        source = store(tmp_path / f"by_{ranks}")
        manifest = read_manifest(source, f"step_{ranks:08d}")
        assert manifest.world_size == len(manifest.files) == ranks
        assert len(list(manifest.chunks("model/embedding.weight"))) == ranks
        assert len(list(manifest.chunks("model/head.weight"))) == 1
        assert len(list(manifest.chunks("optimizer/half"))) == 1  # a replica: written once
        for name, entry in manifest.tensors.items():
            assert all(chunk.start % entry.itemsize == 0 for chunk in manifest.chunks(name))
        values = state(999)
        assert manager(source).load_latest(values) == {"step": ranks}
        assert equal(values, state(ranks))
        assert digest(source.at(f"step_{ranks:08d}")).state == expected(values)


def damage_and_load(root: Path) -> None:
    """Save two checkpoints, damage the newer one in rank 1's share of the verification, and load."""
    save(root, 1)
    save(root, 2)
    if dist.get_rank() == 0:
        damaged = next((root / "step_00000002").glob("rank_00001*"))
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(bytes(data))
        assert verify_checkpoint(store(root), "step_00000002") == [
            f"{damaged.name}: hash differs: the content has changed"]
    dist.barrier()
    load(root, 1, refused=1)


def test_all_ranks_refuse_what_one_finds_damaged(tmp_path: Path):
    on_ranks(2, damage_and_load, tmp_path)


def save_with_failure(root: Path) -> None:
    """Let rank 1's store fail: no rank commits, all continue, and the next save works."""
    mesh = init_device_mesh("cpu", (2,))
    target = FlakyStore(root, failures=99 if dist.get_rank() == 1 else 0, part="step_00000001")
    events = Events()
    saver = manager(target, events)
    for step in (1, 2):
        saver.save(step, state(step, mesh), {"step": step})
        saver.wait()
    if dist.get_rank() == 0:
        assert [kind for kind, _ in events] == ["save_failed", "commit"]
        assert events[0][1]["reason"].startswith("rank 1: ")


def test_a_rank_that_cannot_write_costs_one_save(tmp_path: Path):
    on_ranks(2, save_with_failure, tmp_path)
    assert [info.name for info in list_checkpoints(store(tmp_path))] == ["step_00000002"]


def unfit(root: Path) -> None:
    """Load a state that fits on one rank only: all ranks raise and none hangs."""
    from tidewheel.errors import CheckpointError

    values = state(0)
    if dist.get_rank() == 1:
        values["model"]["more"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="model/more is not in the checkpoint"):
        manager(store(root)).load_latest(values)


def test_an_error_on_one_rank_is_one_on_all(tmp_path: Path):
    saver = manager(store(tmp_path))
    saver.save(1, state(1), {})
    saver.wait()
    on_ranks(2, unfit, tmp_path)


def fsdp(root: Path) -> None:
    """Save an FSDP2 module with AdamW while it trains on: the checkpoint must not contain the later steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)

    def step() -> None:
        model(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def values() -> dict:
        moments = {f"{name}.{moment}": optimizer.state[parameter][moment]
                   for name, parameter in model.named_parameters() for moment in ("exp_avg", "exp_avg_sq")}
        return {"model": {name: p.detach() for name, p in model.named_parameters()}, "optimizer": moments}

    step()
    saver = manager(store(root))
    whole = {group: {name: tensor.full_tensor().clone() for name, tensor in tensors.items()}
             for group, tensors in values().items()}
    saver.save(1, values(), {})
    for _ in range(5):
        step()
    saver.wait()
    loaded = values()
    assert saver.load_latest(loaded) == {}
    assert equal(loaded, whole)
    if dist.get_rank() == 0:
        torch.save(whole, root / "whole.pt")


def test_fsdp_keeps_training_while_it_is_saved(tmp_path: Path):
    on_ranks(2, fsdp, tmp_path)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    values = {group: {name: torch.zeros_like(t) for name, t in tensors.items()} for group, tensors in whole.items()}
    manager(store(tmp_path)).load_latest(values)
    assert equal(values, whole)
