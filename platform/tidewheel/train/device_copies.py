"""Copy batches to a GPU on a stream of their own: the host does not wait, and copies run beside the step's kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Streams(Protocol):
    """What copying needs of a device."""

    def copying(self) -> AbstractContextManager[Any]:
        """Return a context in which copies go to the stream for copies."""

    def copied(self) -> Any:
        """Return an event behind the copies so far. Called in `copying`."""

    def wait(self, event: Any) -> None:
        """Have the stream that computes wait for an event; the host does not."""

    def used(self, tensor: torch.Tensor) -> None:
        """Note that the stream that computes uses a tensor which was allocated in `copying`."""


class CudaStreams(Streams):
    """A CUDA device's stream for copies, and the stream that is current when a batch is used.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def copied(self) -> Any:
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def used(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


class DeviceCopies:
    """Copies of dataclasses of tensors on the training device. On CPU they are the originals.

    Args:
        device: the training device.
        streams: default: those of a CUDA device, none for another one.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._device = device
        self._streams = CudaStreams(device) if streams is None and device.type == "cuda" else streams

    def start(self, batches: list[T]) -> tuple[list[T], Any]:
        """Start to copy, on any thread; return the copies, and the event that `take` waits for."""
        if self._streams is None:
            return [_copied(batch, self._device, pinned=False) for batch in batches], None
        with self._streams.copying():
            copies = [_copied(batch, self._device, pinned=True) for batch in batches]
            return copies, self._streams.copied()

    def take(self, copies: list[T], event: Any) -> list[T]:
        """Return the copies for use by the kernels that the calling thread enqueues from now on.

        Args:
            copies: from `start`.
            event: from `start`.
        """
        if self._streams is not None:
            self._streams.wait(event)
            for batch in copies:
                for value in _tensors(batch):
                    self._streams.used(value)  # or its memory is given away while the step reads it
        return copies


def _copied(value: Any, device: torch.device, *, pinned: bool) -> Any:
    """Return a tensor, or a dataclass with its tensors, on a device.

    Args:
        value: a tensor or dataclass; anything else is returned as it is.
        device: of the result.
        pinned: copy through pinned memory, so that the host does not wait. torch keeps that memory until it is copied.
    """
    if isinstance(value, torch.Tensor):
        return value.pin_memory().to(device, non_blocking=True) if pinned else value.to(device)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: _copied(getattr(value, field.name), device, pinned=pinned)
                             for field in fields(value)})


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a dataclass."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not is_dataclass(value) or isinstance(value, type):
        return []
    return [tensor for field in fields(value) for tensor in _tensors(getattr(value, field.name))]
