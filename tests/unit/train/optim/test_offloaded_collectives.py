"""Updates of offloaded shards: what ranks exchange is on their devices, and the weights stay in host memory.

There is no GPU here, and gloo would take tensors in host memory, which NCCL does not. So torch's fake tensors pretend
to be on another device, and its fake group exchanges nothing: the tests see on which device each collective works.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.ranks import on_ranks
from tests.unit.contrib.test_optimizers import KINDS, rule
from tidewheel.train import optimizers
from tidewheel.train.optim.base import Optimizer
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.parallel.data_parallel import local

DEVICE = "pretended"
SHAPES = {"embedding.weight": (16, 8), "blocks.0.w1": (8, 16), "blocks.0.experts.w1": (4, 8, 8), "blocks.0.norm": (8,)}
LAYOUTS: dict[str, tuple[dict[str, int], dict[int, tuple[Placement, ...]]]] = {
    "zero3": ({"shard": 2}, {1: (Shard(0),), 2: (Shard(0),), 3: (Shard(0),)}),
    "zero3 and tensor": ({"shard": 2, "tensor": 2},
                         {1: (Shard(0), Replicate()), 2: (Shard(0), Shard(1)), 3: (Shard(0), Shard(1))}),
    "groups": ({"replicate": 2, "shard": 2},
               {1: (Replicate(), Shard(0)), 2: (Replicate(), Shard(0)), 3: (Replicate(), Shard(1))}),
}


class Watched(TorchDispatchMode):
    """Lists the devices of the collectives, and gives the host a number where fake tensors have none."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if "c10d" in str(function) and "wait_tensor" not in str(function):
            tensors = torch.utils._pytree.tree_leaves(arguments)
            self.devices += [tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)]
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1
        return function(*arguments, **(named or {}))


def offloaded(mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Placement, ...],
              dtype: torch.dtype) -> DTensor:
    """Return a DTensor whose part is in host memory, as FSDP2 makes it."""
    part = list(shape)
    for size, placement in zip(mesh.shape, placements):
        if isinstance(placement, Shard):
            part[placement.dim] //= size
    whole = torch.empty(shape, device="meta")
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(whole.shape, whole.stride(), dtype))
    return DTensor(torch.empty(part, dtype=dtype), spec, requires_grad=False)


class Weights:
    """Parameters with gradients, in host memory."""

    def __init__(self, mesh: DeviceMesh, layout: str, dtype: torch.dtype) -> None:
        _, placements = LAYOUTS[layout]
        self.named = {name: torch.nn.Parameter(offloaded(mesh, shape, placements[len(shape)], dtype))
                      for name, shape in SHAPES.items()}
        for parameter in self.named.values():
            parameter.grad = torch.zeros_like(parameter)

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.named.items())

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return []


def update_all(layout: str, kinds: Sequence[Optimizer]) -> None:
    """Take updates with fake tensors and assert where ranks exchange."""
    _setup_privateuseone_for_python_backend(DEVICE)
    dist.destroy_process_group()
    sizes, _ = LAYOUTS[layout]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes.values()))
    mesh = init_device_mesh(DEVICE, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for optimizer in kinds:
        for dtype in (torch.float32, torch.bfloat16):
            with FakeTensorMode(allow_non_fake_inputs=True), Watched() as watched:
                model = Weights(mesh, layout, dtype)
                built = build_optimizer(model, optimizer)
                before = len(watched.devices)
                built.step()
                held = [*model.named.values(), *built.tensors().values()]
                assert {local(tensor).device.type for tensor in held} == {"cpu"}, optimizer
            assert set(watched.devices) <= {DEVICE}, optimizer
            assert bool(watched.devices[before:]) == bool(optimizer.NOT_OVERLAPPED), optimizer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_exchange_what_is_on_their_devices(layout: str):
    kinds = [*map(optimizers.KIND.build, optimizers.KIND.built_in()), *map(rule, KINDS)]
    on_ranks(1, update_all, layout, [optimizer for optimizer in kinds if not optimizer.NOT_OFFLOADABLE])
