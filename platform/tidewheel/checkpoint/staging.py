"""Copy the state to host memory, so that it can be uploaded while training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tidewheel.checkpoint.tensor_entry import DTYPES
from tidewheel.errors import CheckpointError
from tidewheel.train.memory import scratch_file
from tidewheel.train.runtime import AVERAGE, OUTER


def flatten(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return {"model/name": tensor} for a nested dict of tensors.

    Args:
        state: the dict.
        prefix: put before each path.

    Raises:
        CheckpointError: a value is not a tensor, or has a dtype that cannot be stored.
    """
    flat: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        path = f"{prefix}{key}"
        tensors = flatten(value, f"{path}/") if isinstance(value, dict) else {path: value}
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or dtype_name(tensor) not in DTYPES:
                kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise CheckpointError(f"{name} is {kind}, which a checkpoint cannot hold", where="checkpoint",
                                      fix="give tensors in the state, everything else in `extra`")
            if name in flat:
                raise CheckpointError(f"two tensors are named {name}", where="checkpoint", fix="rename one")
            flat[name] = tensor
    return flat


def without_absent(flat: dict[str, torch.Tensor], held: Container[str]) -> dict[str, torch.Tensor]:
    """Return the tensors without those averages and residuals of outer gradients that a checkpoint does not hold.

    Args:
        flat: tensors by path, see `flatten`.
        held: paths of the checkpoint's tensors.
    """
    optional = (f"{AVERAGE}/", f"{OUTER}/")
    return {path: tensor for path, tensor in flat.items() if not path.startswith(optional) or path in held}


def dtype_name(tensor: torch.Tensor) -> str:
    """Return torch's name of the tensor's dtype, "float32", as in `manifest.DTYPES`."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Snapshot:
    """The moment at which tensors are to be copied.

    A thread may copy them inside `copying` while training goes on reading them. They must not change until it is done.
    """

    device: torch.device | None = None
    """Device of the tensors; None: the host."""
    ready: Any = None
    """CUDA event that completes when the device has done all work queued before that moment."""

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> Snapshot:
        """Return the snapshot of `tensors` as they are now."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is None:
            return cls()
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
        return cls(device, ready)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Run copies to the host in the block on a stream of their own, and wait for them at its end."""
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
    """Host memory for this rank's part of a state, allocated at the first use and then reused.

    A tensor on disk is copied on disk.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, parts: dict[str, torch.Tensor], snapshot: Snapshot) -> dict[str, torch.Tensor]:
        """Return a contiguous copy of each tensor on the CPU, valid until the next call. Any thread may call this.

        Args:
            parts: this rank's part of each tensor, by path.
            snapshot: when to copy.
        """
        for name in self._buffers.keys() - parts.keys():
            del self._buffers[name]
        with snapshot.copying():
            for name, part in parts.items():
                buffer = self._buffers.get(name)
                if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
                    buffer = _buffer(part)
                    self._buffers[name] = buffer
                buffer.copy_(part, non_blocking=part.is_cuda)
        return dict(self._buffers)


def _buffer(part: torch.Tensor) -> torch.Tensor:
    """Return memory for a copy of a tensor, on the host; on disk if the tensor is there (`memory.optimizer_disk`)."""
    folder = scratch_file.folder_of(part)
    if folder is not None:
        return scratch_file.empty_like(part, folder)
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as a plain tensor, sharing its memory."""
    part = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
    return getattr(part, "_tensor", part)  # torchao wraps weights that FSDP2 gathers in fp8
