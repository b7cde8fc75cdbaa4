"""A copy of the state that training may not touch, so that it can be uploaded while training goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tidewheel.checkpoint.manifest import DTYPES
from tidewheel.errors import CheckpointError


def flatten(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """{"model/name": tensor} of a nested dict of tensors.

    Raises:
        CheckpointError: something in it is not a tensor, or of a dtype that cannot be stored.
    """
    flat: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        path = f"{prefix}{key}"
        found = flatten(value, f"{path}/") if isinstance(value, dict) else {path: value}
        for name, tensor in found.items():
            if not isinstance(tensor, torch.Tensor) or dtype_name(tensor) not in DTYPES:
                kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise CheckpointError(f"{name} is {kind}, which a checkpoint cannot hold", where="checkpoint",
                                      mend="give tensors in the state, everything else in `extra`")
            if name in flat:
                raise CheckpointError(f"two tensors are named {name}", where="checkpoint", mend="rename one")
            flat[name] = tensor
    return flat


def dtype_name(tensor: torch.Tensor) -> str:
    """"float32", as in `manifest.DTYPES`."""
    return str(tensor.dtype).removeprefix("torch.")


class Stage:
    """Host memory for this rank's part of a state; allocated at the first use, then kept for the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, flat: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's part of each tensor, contiguous on CPU; valid until the next call."""
        asynchronous = False
        for name in self._buffers.keys() - flat.keys():
            del self._buffers[name]
        for name, tensor in flat.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(local, non_blocking=local.is_cuda)
            asynchronous |= local.is_cuda
        if asynchronous:
            torch.cuda.synchronize()
        return dict(self._buffers)
