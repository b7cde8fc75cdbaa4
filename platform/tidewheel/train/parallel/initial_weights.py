"""Initial weights of this rank's part of the model. They do not depend on the layout."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tidewheel.models.family import Model
from tidewheel.models.initial_values import init_parameter, init_rows
from tidewheel.train.parallel.model import ParallelModel


@torch.no_grad()
def init_weights(model: ParallelModel, seed: int) -> None:
    """Initialise every parameter, and set buffers to 0.

    Each rank draws the rows that it holds, one parameter at a time, on CPU.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(_initial_part(name, parameter, model.config, seed))
        else:
            parameter.copy_(init_parameter(name, parameter.shape, model.config, seed))
    for _, buffer in model.named_buffers():
        buffer.zero_()
    model.refresh()


def _initial_part(name: str, parameter: DTensor, config: Model, seed: int) -> torch.Tensor:
    """Return the initial value of this rank's part of a parameter."""
    rows, *others = [_indices(parameter, dim) for dim in range(parameter.ndim)]
    if not len(rows):
        return parameter.to_local().new_empty(parameter.to_local().shape)
    if parameter.ndim == 3 and len(others[0]) < parameter.shape[1]:
        part = _stacked_rows(name, parameter.shape, config, seed, rows, others[0])
        return part if len(others[1]) == parameter.shape[2] else part.index_select(2, others[1])
    hull = range(int(rows[0]), int(rows[-1]) + 1)
    part = init_rows(name, parameter.shape, config, seed, hull)
    if len(hull) > len(rows):
        part = part[rows - rows[0]]
    for dim, indices in enumerate(others, 1):
        if len(indices) < part.shape[dim]:
            part = part.index_select(dim, indices)
    return part


def _stacked_rows(name: str, shape: torch.Size, config: Model, seed: int, matrices: torch.Tensor,
                  rows: torch.Tensor) -> torch.Tensor:
    """Return some rows of some of the matrices of a parameter [E, M, N]. Few other rows are drawn.

    Args:
        name: name in the whole model.
        shape: of the whole parameter.
        config: the model family's settings.
        seed: of the run.
        matrices: indices in the first dimension.
        rows: indices in the second dimension, ascending.
    """
    flat = (shape[0] * shape[1], shape[2])
    first, last = int(rows[0]), int(rows[-1])
    parts = []
    for matrix in matrices.tolist():
        start = matrix * shape[1]
        hull = init_rows(name, flat, config, seed, range(start + first, start + last + 1))
        parts.append(hull[rows - first])
    return torch.stack(parts)


def _indices(parameter: DTensor, dim: int) -> torch.Tensor:
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
