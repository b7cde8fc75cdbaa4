"""A copy of the state that training may not touch, so that it can be uploaded while training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Snapshot:
    """Tensors as they are when this is made. A thread may copy them in `copying` while the training goes on reading
    them; until that is done they must not change."""

    device: torch.device | None = None
    """Of those that are not on the host."""
    ready: Any = None
    """What was asked of the device until then."""

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> Snapshot:
        """Of now."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is None:
            return cls()
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
        return cls(device, ready)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies to the host that are asked for inside, beside what else the device does; done when the block ends."""
        if self.device is None:
            with torch.no_grad():
                yield
            return
        stream = torch.cuda.Stream(self.device)
        stream.wait_event(self.ready)
        with torch.no_grad(), torch.cuda.stream(stream):
            yield
        stream.synchronize()


class Stage:
    """Host memory for this rank's part of a state; allocated at the first use, then kept for the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, parts: dict[str, torch.Tensor], snapshot: Snapshot) -> dict[str, torch.Tensor]:
        """This rank's part of each tensor, contiguous on CPU; valid until the next call. Any thread may call it."""
        for name in self._buffers.keys() - parts.keys():
            del self._buffers[name]
        with snapshot.copying():
            for name, part in parts.items():
                buffer = self._buffers.get(name)
                if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
                    buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
                    self._buffers[name] = buffer
                buffer.copy_(part, non_blocking=part.is_cuda)
        return dict(self._buffers)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
