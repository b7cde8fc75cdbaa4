"""Collectives of DTensors whose parts are in host memory (`parallel.offload`).

FSDP2 keeps these parts on the CPU while their mesh is one of GPUs, whose group (NCCL) takes tensors on GPUs alone. So a
part goes to its GPU before the ranks exchange it, and the result comes back. Without offload nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement


def on_mesh(tensor: DTensor) -> DTensor:
    """Return a DTensor with its parts on the device of its mesh, where its ranks can exchange them."""
    part, device_type = tensor.to_local(), tensor.device_mesh.device_type
    if part.device.type == device_type:
        return tensor
    return DTensor.from_local(part.to(device_type), tensor.device_mesh, tensor.placements, run_check=False,
                              shape=tensor.shape, stride=tensor.stride())


def redistributed(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Return `tensor.redistribute(placements=placements)` with its part on the device of the tensor's part."""
    moved = on_mesh(tensor).redistribute(placements=placements)
    return with_part(moved, moved.to_local().to(tensor.to_local().device), moved.shape)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a DTensor, which its ranks gather together, on the device of its part; a plain tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    return on_mesh(tensor).full_tensor().to(tensor.to_local().device)


def with_part(like: DTensor, part: torch.Tensor, shape: Sequence[int]) -> DTensor:
    """Return this rank's part of a contiguous tensor as a DTensor. `DTensor.from_local` would move it to the mesh.

    Args:
        like: is sharded in the same way.
        part: of this rank, on any device; the result shares its memory.
        shape: of the whole tensor.
    """
    stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, part.dtype)
    return DTensor(part, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)


def own_part(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor that every rank has, sharded as `like` and on the device of its part.

    Nothing is sent.
    """
    part = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local()
    return part.to(like.to_local().device)
