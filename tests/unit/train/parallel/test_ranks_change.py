"""Tests that a process with a new rank in a new group holds the shards of the new rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import VOCABULARY, config, micro_batches
from tidewheel.train import parallel
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.parallel.mesh import Mesh
from tidewheel.train.runtime import Runtime


def generations(folder: Path) -> Iterator[tuple[int, int]]:
    """Create four groups of two ranks in turn and swap the ranks each time; yield (number, rank)."""
    process = dist.get_rank()
    dist.barrier()  # who leaves before the others are connected breaks their connections
    dist.destroy_process_group()
    for number, rank in enumerate((process, 1 - process, 1 - process, process)):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=2)
        for _ in range(number):
            dist.new_group([0, 1])  # so that the mesh's groups have other names than before
        yield number, rank
        dist.barrier()
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `on_ranks` ends one


def sharded_layers(folder: Path) -> None:
    for number, rank in generations(folder):
        for tensor in some_steps(Mesh.build(ParallelConfig(), Runtime(rank, 2))):
            assert tensor.device_mesh.get_coordinate() == (rank,), f"generation {number}"
            assert torch.equal(tensor.full_tensor()[4 * rank:4 * rank + 4], tensor.to_local())


def some_steps(mesh: Mesh) -> list[Any]:
    """Return parameters and moments of a sharded layer after some steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 8)
    fully_shard(model, mesh=mesh.shard_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model.weight.detach(), model.weight.detach() * 2, optimizer.state[model.weight]["exp_avg"]]


def test_shards_follow_the_rank(tmp_path: Path):
    on_ranks(2, sharded_layers, tmp_path)


def rows_in_three_threads(folder: Path) -> None:
    """Use threads that live as long as the process, as autograd's do on CUDA."""
    pools = [ThreadPoolExecutor(1) for _ in range(2)]
    for number, rank in generations(folder):
        mesh = Mesh.build(ParallelConfig(tensor=2), Runtime(rank, 2)).of("tensor")
        assert mesh is not None
        rows = [some_rows(mesh), *(pool.submit(some_rows, mesh).result() for pool in pools)]
        for thread, tensor in enumerate(rows):
            where = f"generation {number}, thread {thread}"
            assert tensor.to_local().tolist() == [[4.0 * rank, 4.0 * rank + 1], [4.0 * rank + 2, 4.0 * rank + 3]], where
            assert tensor.device_mesh is mesh, where
            assert torch.equal(tensor.full_tensor(), torch.arange(8.0).view(4, 2)), where


@torch.no_grad()
def some_rows(mesh: Any) -> Any:
    copies = DTensor.from_local(torch.arange(8.0).view(4, 2), mesh, [Replicate()], run_check=False) * 1
    return copies.redistribute(placements=[Shard(0)])


def test_every_thread_shards_for_the_current_rank(tmp_path: Path):
    on_ranks(2, rows_in_three_threads, tmp_path)


def meshes_that_live(folder: Path) -> None:
    """Count live meshes. They hold process groups, which hold connections and threads."""
    counts = []
    for _, rank in generations(folder):
        train(rank)
        gc.collect()
        counts.append(sum(isinstance(get_object, DeviceMesh) for get_object in gc.get_objects()))
    assert counts[-1] == counts[1], counts


def train(rank: int) -> None:
    """A step of a model that is sharded and tensor parallel, as far as two ranks allow: one after the other."""
    for layout in ({"tensor": 2}, {"data": "zero3"}):
        model = parallel.build(config(layout), VOCABULARY, Runtime(rank, 2))
        parallel.init_weights(model, seed=3)
        model.forward_backward(micro_batches(0, model.mesh.data_rank, model.mesh.data_size), nullcontext())


def test_no_cache_keeps_the_mesh_of_an_earlier_generation(tmp_path: Path):
    on_ranks(2, meshes_that_live, tmp_path)
