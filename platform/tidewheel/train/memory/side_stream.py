"""Copies between a GPU and pinned host memory on a stream beside that of the computation."""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

import torch

from tidewheel.train.memory.inputs_config import LEAVING
from tidewheel.train.memory.kept_inputs import Kept


class _Leaving(NamedTuple):
    kept: weakref.ref[Kept]
    x: torch.Tensor
    copied: torch.cuda.Event


class Arriving(NamedTuple):
    """An input on its way back."""

    x: torch.Tensor
    """On the GPU; its values are there after `copied`."""
    copied: torch.cuda.Event


class SideStream:
    """Copies inputs in order on a stream of its own.

    Tensors on the GPU belong to the stream of the computation. It waits for a copy before it frees or uses one, so the
    allocator needs no record of the other stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._leaving: deque[_Leaving] = deque()

    def away(self, kept: Kept, x: torch.Tensor, host: torch.Tensor) -> torch.cuda.Event:
        """Copy an input to pinned host memory; return the event after which it is there.

        Args:
            kept: of the input.
            x: on the GPU.
            host: pinned memory of its shape.
        """
        while len(self._leaving) >= LEAVING:
            self._free(self._leaving.popleft())
        copied = self._copy(host, x)
        self._leaving.append(_Leaving(weakref.ref(kept), x, copied))
        return copied

    def here(self, kept: Kept) -> torch.Tensor | None:
        """Return an input that is still on the GPU; None: it has been freed. Free those that the graph let go of."""
        alive = []
        for leaving in self._leaving:
            if leaving.kept() is None:
                self._free(leaving)
            else:
                alive.append(leaving)
        self._leaving = deque(alive)
        return next((leaving.x for leaving in alive if leaving.kept() is kept), None)

    def back(self, kept: Kept, host: torch.Tensor) -> Arriving:
        """Start to copy an input to the GPU.

        Args:
            kept: of the input.
            host: pinned memory of its shape.
        """
        x = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
        return Arriving(x, self._copy(x, host))

    def arrived(self, arriving: Arriving) -> torch.Tensor:
        """Return an input that the computation may use from now on."""
        torch.cuda.current_stream(self._device).wait_event(arriving.copied)
        return arriving.x

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Copy after what the computation has started so far, which computes `source` or still uses the memory of
        `to`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _free(self, leaving: _Leaving) -> None:
        torch.cuda.current_stream(self._device).wait_event(leaving.copied)
