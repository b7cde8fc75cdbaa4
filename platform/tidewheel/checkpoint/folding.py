"""Load tensors of which only the sum over slots counts, when they were saved by another number of slots.

A checkpoint has [slots, elements] of them, a row for each worker that saved it. Each worker that loads it reads as many
rows as others do and adds them up, so that the sum over all workers stays. With the number of slots that saved it,
every worker gets its own row back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tidewheel.checkpoint.staging import local
from tidewheel.train.runtime import SUMMED


class Stored(Protocol):
    """What is known of a stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""


class Folding:
    """Reads rows of other slots into memory of their own, and then adds them up.

    Args:
        flat: tensors to fill, by path.
        held: tensors of the checkpoint, by path.

    Attributes:
        tensors: what to read instead of `flat`.
    """

    def __init__(self, flat: Mapping[str, torch.Tensor], held: Mapping[str, Stored]) -> None:
        self.tensors = dict(flat)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for path, tensor in flat.items():
            stored = held.get(path)
            if path.startswith(SUMMED) and stored is not None and stored.shape[1:] == tuple(tensor.shape[1:]) and (
                    stored.shape[0] != tensor.shape[0]):
                self.tensors[path] = _rows(tensor, tuple(stored.shape))
                self._pairs.append((local(tensor), local(self.tensors[path])))

    @torch.no_grad()
    def add_up(self) -> None:
        """Set the tensors to the sums of the rows that were read."""
        for target, rows in self._pairs:
            target.zero_()
            for index, row in enumerate(rows):
                target[index % len(target)] += row


def _rows(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return memory for this rank's rows of a tensor [slots, elements] that has another number of slots."""
    if not isinstance(tensor, DTensor):
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    mesh, placements = tensor.device_mesh, [Shard(0)]
    own, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    rows = torch.empty(own, dtype=tensor.dtype, device=tensor.device)
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size(shape),
                              stride=(shape[1], 1))
