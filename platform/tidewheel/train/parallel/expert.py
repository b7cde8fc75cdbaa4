"""Expert parallelism: neighbouring ranks share the experts of each layer, and rows travel to the rank of their expert.

The ranks of shard x context are seen in two ways. All other parameters are sharded over all of them. Experts are
sharded by expert over `parallel.expert` neighbours, and FSDP2 shards each expert's weights over the ranks that hold the
same experts. Megatron-LM calls this parallel folding (https://arxiv.org/abs/2504.14960), torchtitan has it as well.
With tensor parallelism an expert's inner width is also sharded over the tensor ranks, see `tensor.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from tidewheel.models.moe.experts import Experts
from tidewheel.models.moe.layer import MoE
from tidewheel.train.parallel.dispatch import AllToAll
from tidewheel.train.parallel.mesh import Mesh
from tidewheel.train.reproducible.exchange import Group, OrderedSum
from tidewheel.train.reproducible.experts import BySource
from tidewheel.train.reproducible.gradient_order import GradientOrder


@dataclass(frozen=True)
class ShardedExperts:
    """How FSDP2 shards the experts of a part of the model.

    Args:
        mesh: the ranks with the same experts, after replicas with HSDP. In reproducible mode it has only the shards.
        sums: of reproducible mode, creates the sum of the gradients of a layer's experts.
    """

    mesh: DeviceMesh
    sums: Callable[[], OrderedSum] | None = None

    @classmethod
    def of(cls, mesh: Mesh, order: GradientOrder | None) -> ShardedExperts:
        """Return how the experts of a run are sharded.

        Args:
            mesh: the ranks.
            order: of reproducible mode.
        """
        if order is None:
            return cls(mesh.expert_shard_mesh())
        near = Group.experts(mesh)
        far = Group.copies(mesh) if mesh.size("replicate") > 1 else None
        return cls(mesh.expert_shard_mesh(replicate=False), lambda: OrderedSum(order, near, far))


def apply(part: nn.Module, mesh: Mesh, *, reproducible: bool) -> None:
    """Give each rank its part of the experts, and let rows travel. Call it after tensor parallelism.

    Args:
        part: a decoder or a pipeline stage on the meta device.
        mesh: the ranks.
        reproducible: compute products whose bits do not depend on `parallel.expert`, also without expert parallelism.
    """
    for layer in layers(part):
        experts = layer.experts
        if reproducible:
            experts.arithmetic = BySource(experts.output_bias_share)
        if mesh.expert > 1:
            _shard(experts, mesh)
            layer.dispatch = AllToAll(mesh.expert_group(), mesh.expert, apart=reproducible)


def layers(part: nn.Module) -> Iterator[MoE]:
    """Yield the layers of a decoder or a pipeline stage that have experts."""
    for module in part.modules():
        if isinstance(module, MoE):
            yield module


def _shard(experts: Experts, mesh: Mesh) -> None:
    """Replace the weights of all experts on the meta device by DTensors that are sharded by expert."""
    grid = mesh.expert_mesh()
    for name, weight in list(experts.named_parameters()):
        placements: list[Placement] = [Shard(0)]
        held: torch.Tensor = weight
        if isinstance(weight, DTensor):  # sharded by tensor parallelism
            placements += weight.placements
            held = weight.to_local()
        held = held.detach()[:len(weight) // mesh.expert]
        sharded = DTensor.from_local(held, grid, placements, run_check=False, shape=weight.shape,
                                     stride=weight.stride())
        setattr(experts, name, nn.Parameter(sharded))


def placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Return which dimension of a parameter FSDP2 shards.

    Stacked weights of experts [E, M, N] are sharded by expert if the ranks divide E, else by M if they divide it, so
    that no rank holds padding. A row of N elements stays whole. None: the first dimension, as for other parameters.

    Args:
        mesh: FSDP2's; the last dimension is that of the shards.
    """
    ranks = mesh.size(mesh.ndim - 1)

    def shard(parameter: nn.Parameter) -> Shard | None:
        if parameter.ndim < 3:
            return None
        local: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(1) if local.shape[0] % ranks and local.shape[1] % ranks == 0 else Shard(0)

    return shard
