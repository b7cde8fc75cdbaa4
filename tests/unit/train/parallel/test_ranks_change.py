"""A process that gets another rank, in a group made anew, holds that rank's shards and not those it had before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.ranks import on_ranks
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.parallel.mesh import Mesh
from tidewheel.train.runtime import Runtime


def generations(folder: Path) -> None:
    process = dist.get_rank()
    dist.barrier()  # who leaves before the others are connected breaks their connections
    dist.destroy_process_group()
    for number, rank in enumerate((process, 1 - process, 1 - process, process)):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=2)
        for _ in range(number):
            dist.new_group([0, 1])  # so that the mesh's groups have other names than before
        for tensor in some_steps(Mesh.build(ParallelConfig(), Runtime(rank, 2))):
            assert tensor.device_mesh.get_coordinate() == (rank,), f"generation {number}"
            assert torch.equal(tensor.full_tensor()[4 * rank:4 * rank + 4], tensor.to_local())
        dist.barrier()
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `on_ranks` ends one


def some_steps(mesh: Mesh) -> list[Any]:
    """Parameters and moments of a sharded layer."""
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
    on_ranks(2, generations, tmp_path)
