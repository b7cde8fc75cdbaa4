"""Set this rank's part of a parameter to a value that is drawn by rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

Draw = Callable[[str, torch.Size, range], torch.Tensor]
"""From a parameter's name, its whole shape and a range of its rows to these rows, fp32 on CPU."""


def fill(name: str, parameter: torch.Tensor, draw: Draw) -> None:
    """Set this rank's part of a parameter to its initial value.

    Args:
        name: in the whole model.
        parameter: tensor or DTensor.
        draw: returns rows of the initial value.
    """
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(_initial_part(name, parameter, draw))
    else:
        parameter.copy_(draw(name, parameter.shape, range(parameter.shape[0])))


def _initial_part(name: str, parameter: DTensor, draw: Draw) -> torch.Tensor:
    """Return the initial value of this rank's part of a parameter."""
    rows, *others = [own_indices(parameter, dim) for dim in range(parameter.ndim)]
    if not len(rows):
        return parameter.to_local().new_empty(parameter.to_local().shape)
    if parameter.ndim == 3 and len(others[0]) < parameter.shape[1]:
        part = _stacked_rows(name, parameter.shape, draw, rows, others[0])
        return part if len(others[1]) == parameter.shape[2] else part.index_select(2, others[1])
    hull = range(int(rows[0]), int(rows[-1]) + 1)
    part = draw(name, parameter.shape, hull)
    if len(hull) > len(rows):
        part = part[rows - rows[0]]
    for dim, indices in enumerate(others, 1):
        if len(indices) < part.shape[dim]:
            part = part.index_select(dim, indices)
    return part


def _stacked_rows(name: str, shape: torch.Size, draw: Draw, matrices: torch.Tensor,
                  rows: torch.Tensor) -> torch.Tensor:
    """Return some rows of some of the matrices of a parameter [E, M, N]. Few other rows are drawn.

    Args:
        name: name in the whole model.
        shape: of the whole parameter.
        draw: returns rows of the initial value.
        matrices: indices in the first dimension.
        rows: indices in the second dimension, ascending.
    """
    flat = torch.Size((shape[0] * shape[1], shape[2]))
    first, last = int(rows[0]), int(rows[-1])
    parts = []
    for matrix in matrices.tolist():
        start = matrix * shape[1]
        hull = draw(name, flat, range(start + first, start + last + 1))
        parts.append(hull[rows - first])
    return torch.stack(parts)


def own_indices(parameter: DTensor, dim: int) -> torch.Tensor:
    """Return the indices of a parameter's dimension that this rank holds, ascending, int64 on CPU."""
    whole = torch.arange(parameter.shape[dim], device=parameter.device)
    placements: list[Placement] = []
    for placement in parameter.placements:
        if isinstance(placement, _StridedShard) and placement.dim == dim:  # of some releases, a `Shard`
            placements.append(_StridedShard(0, split_factor=placement.split_factor))
        elif placement.is_shard(dim):
            placements.append(Shard(0))
        else:
            placements.append(Replicate())
    # every rank has the indices, so nothing is sent
    return distribute_tensor(whole, parameter.device_mesh, placements, src_data_rank=None).to_local().cpu()
