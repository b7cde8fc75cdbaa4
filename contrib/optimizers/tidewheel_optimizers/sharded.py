"""Parameters that may be sharded: this rank's part, the whole, and sums over the ranks that share one.

With `parallel.offload` the parts are in host memory while the ranks exchange what is on their GPUs. Torch moves a part
there when it makes a DTensor of it; the results are moved back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; a plain tensor as it is."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a DTensor, which all its ranks gather together; a plain tensor as it is."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    mine = tensor.to_local()
    there = DTensor.from_local(mine, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
                               stride=tensor.stride())
    return there.full_tensor().to(mine.device)


def part(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor that every rank has, placed like another one."""
    if not isinstance(like, DTensor):
        return value
    mine = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local()
    return mine.to(value.device)


def square_norms(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the squared norm of each whole tensor, fp32 [n], with one sum over ranks for each way of sharding.

    Args:
        tensors: this rank's parts.
        like: the parameters, which say how they are sharded.
    """
    sums = torch.stack([tensor.float().square().sum() for tensor in tensors])
    alike: dict[Any, list[int]] = defaultdict(list)
    for number, parameter in enumerate(like):
        if isinstance(parameter, DTensor):
            alike[parameter.device_mesh, parameter.placements].append(number)
    for (mesh, placements), numbers in alike.items():
        over = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
        sums[numbers] = DTensor.from_local(sums[numbers], mesh, over, run_check=False).full_tensor().to(sums.device)
    return sums
