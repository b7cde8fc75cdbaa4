"""Adapters under tensor parallelism: their parameters follow the cut of the layer that they adapt.

A layer that is cut by columns has an adapter whose outputs are cut; one cut by rows has an adapter whose inputs are
cut. The other parameters are whole on every rank, and each rank computes a part of their gradient, which is summed
as that of a norm is. Products are computed on this rank's parts and need no communication of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor


def cut_of(weight: torch.Tensor) -> int | None:
    """Return the dimension of a layer's matrix that tensor parallelism cuts; None: it is whole."""
    if not isinstance(weight, DTensor):
        return None
    return next((placement.dim for placement in weight.placements if isinstance(placement, Shard)), None)


def distribute(adapter: nn.Module, weight: DTensor, cuts: Mapping[int, Mapping[str, int]]) -> None:
    """Make DTensors of an adapter's parameters, which are on the meta device.

    Args:
        adapter: of one module.
        weight: the module's, [O, I], or [E, O, I] of experts, which expert parallelism cuts in the first dimension.
        cuts: {dimension of [O, I] that tensor parallelism cuts: {parameter: its dimension that is cut}}; the others are
            whole.
    """
    stack = weight.ndim - 2
    for name, parameter in list(adapter.named_parameters(recurse=False)):
        placements: list[Placement] = []
        for placement in weight.placements:
            dim = placement.dim if isinstance(placement, Shard) else None
            if dim is None or (dim >= stack and name not in cuts.get(dim - stack, {})):
                placements.append(Replicate())
            else:
                placements.append(Shard(dim if dim < stack else cuts[dim - stack][name] + stack))
        value = distribute_tensor(parameter.detach(), weight.device_mesh, placements, src_data_rank=None)
        adapter.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter or an activation.

    Of a whole one, each rank computes a part of the gradient. Of a sum's part, each rank has the whole gradient.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=[_of_gradient(placement) for placement in tensor.placements])


def _of_gradient(placement: Placement) -> Placement:
    if placement.is_replicate():
        return Partial()
    return Replicate() if placement.is_partial() else placement


def like(part: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of an output in the form of `output`: a DTensor of the same placement, or a tensor."""
    if not isinstance(output, DTensor):
        return part
    return DTensor.from_local(part, output.device_mesh, output.placements, run_check=False)
