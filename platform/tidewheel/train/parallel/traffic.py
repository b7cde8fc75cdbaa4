"""Collectives that sum gradients, with the bytes that they send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the first name since torch 2.13


@dataclass
class Traffic:
    """Bytes that this rank sends for the sums of gradients, counted where they are handed to a collective.

    They are those of the usual algorithms, which send least: a ring for an all-reduce and an all-gather, pairs for an
    all-to-all. What a transport adds is not counted.

    Args:
        sent: bytes since the last `take`.
    """

    sent: float = 0.0

    def take(self) -> int:
        """Return the bytes since the last call."""
        sent, self.sent = self.sent, 0.0
        return round(sent)

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> Any:
        """Start to sum a tensor over the ranks, in place, and return what to wait for.

        Args:
            tensor: of the same shape on all ranks.
            group: process group.
        """
        size = dist.get_world_size(group)
        self.sent += 2 * (size - 1) / size * tensor.nbytes
        return dist.all_reduce(tensor, group=group, async_op=True)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
        """Start to gather tensors of all ranks, and return what to wait for.

        Args:
            whole: receives them, in the order of the ranks.
            own: of this rank.
            group: process group.
        """
        self.sent += (dist.get_world_size(group) - 1) * own.nbytes
        return _all_gather(whole, own, group=group, async_op=True)

    def all_to_all(self, received: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
        """Start to exchange equal pieces, and return what to wait for.

        Args:
            received: receives the pieces for this rank, in the order of the ranks.
            own: the n-th piece goes to rank n.
            group: process group.
        """
        size = dist.get_world_size(group)
        self.sent += (size - 1) / size * own.nbytes
        return dist.all_to_all_single(received, own, group=group, async_op=True)
