"""Fill a rank's tensors from boxes that are stored anywhere: what to read of each, and where to put it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tidewheel.checkpoint.sharding import Box

WINDOW_BYTES = 32 << 20
"""Neighbouring boxes are read together, up to this length."""


@dataclass(frozen=True)
class Request:
    """The common part of a stored box and a rank's part of a tensor, and the bytes that contain it."""

    target: torch.Tensor
    """View of the rank's tensor, of the common part's shape."""
    dtype: torch.dtype
    """Of the stored elements; they are converted when they are copied."""
    common: Box
    """The common part, within the rows that are read."""
    rows: tuple[int, ...]
    """Shape of the rows that are read: all of the stored box but for the first dimension."""
    start: int
    """First byte of these rows, from the same origin as the stored box's."""
    end: int
    """Byte behind the last."""

    @classmethod
    def of(cls, tensor: torch.Tensor, own: Box, stored: Box, dtype: torch.dtype, start: int) -> Request | None:
        """Return what to read of a stored box; None if it has nothing of the rank's part.

        Args:
            tensor: the rank's part of a tensor, of shape `own.sizes`.
            own: the part's box.
            stored: the stored box.
            dtype: of its elements.
            start: its first byte.
        """
        common = own.common(stored)
        if common is None:
            return None
        target = tensor
        for dimension, (offset, base, size) in enumerate(zip(common.offsets, own.offsets, common.sizes)):
            target = target.narrow(dimension, offset - base, size)
        rows, within = list(stored.sizes), [offset - base for offset, base in zip(common.offsets, stored.offsets)]
        if rows:  # only the wanted rows, which are contiguous
            start += within[0] * math.prod(rows[1:]) * dtype.itemsize
            rows[0], within[0] = common.sizes[0], 0
        return cls(target, dtype, Box(tuple(within), common.sizes), tuple(rows), start,
                   start + math.prod(rows) * dtype.itemsize)

    @torch.no_grad()
    def fill(self, data: torch.Tensor) -> None:
        """Copy the common part into the tensor.

        Args:
            data: bytes [start, end): uint8 [end - start].
        """
        if data.storage_offset() % self.dtype.itemsize:  # a view of another dtype needs alignment
            data = data.clone()
        rows = data.view(self.dtype).view(self.rows)
        for dimension, (offset, size) in enumerate(zip(self.common.offsets, self.common.sizes)):
            rows = rows.narrow(dimension, offset, size)
        self.target.copy_(rows)


def windows(requests: Iterable[Request], gap: int) -> list[list[Request]]:
    """Group neighbouring requests that are read together, up to `WINDOW_BYTES`.

    Args:
        requests: of one file.
        gap: bytes between two requests that may be read in vain.
    """
    grouped: list[list[Request]] = []
    for request in sorted(requests, key=lambda request: request.start):
        last: Sequence[Request] = grouped[-1] if grouped else ()
        if last and request.start - last[-1].end <= gap and request.end - last[0].start <= WINDOW_BYTES:
            grouped[-1].append(request)
        else:
            grouped.append([request])
    return grouped


def fill_window(window: Sequence[Request], data: torch.Tensor) -> None:
    """Fill the requests of a window.

    Args:
        window: the requests.
        data: bytes from the start of the first to the end of the last: uint8.
    """
    first = window[0].start
    for request in window:
        request.fill(data[request.start - first:request.end - first])
