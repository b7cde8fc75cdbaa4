"""All-to-all over heads: each context rank attends with some of the heads to whole rows.

Before attention, ranks exchange positions for heads: from all heads of L / N positions to H / N heads of L positions;
afterwards back (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509, section 3.1). The kernel sees complete rows, so
every kernel works, and attention costs all ranks the same whatever the documents are. With fewer key heads than ranks,
several ranks get the same key head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class HeadExchange:
    """The exchange between context ranks that hold neighbouring pieces of rows.

    Args:
        group: process group of the context ranks.
        rank: in the group.
        size: number of context ranks, N.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size

    def to_heads(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Return for each part this rank's heads of all positions, by one all-to-all.

        Args:
            parts: [B, h, L / N, E] each, all heads of this rank's positions. A part whose number of heads N does not
                divide is of keys or values, and its heads are repeated first.

        Returns:
            [B, h / N, L, E] each; [B, 1, L, E] where heads were repeated.
        """
        size = self._size
        divided = []
        for part in parts:
            if part.shape[1] % size:
                part = part.repeat_interleave(size // part.shape[1], dim=1)
            divided.append(part.unflatten(1, (size, -1)).transpose(0, 1))  # [N, B, h / N, L / N, E]
        received = _AllToAll.apply(torch.cat([part.flatten(1) for part in divided], dim=1), self._group)
        pieces = received.split([part[0].numel() for part in divided], dim=1)
        return [piece.view(part.shape).permute(1, 2, 0, 3, 4).flatten(2, 3) for piece, part in zip(pieces, divided)]

    def to_positions(self, out: torch.Tensor) -> torch.Tensor:
        """Return all heads of this rank's positions, [B, h N, L / N, E].

        Args:
            out: this rank's heads of all positions, [B, h, L, E].
        """
        divided = out.unflatten(2, (self._size, -1)).permute(2, 0, 1, 3, 4)  # [N, B, h, L / N, E]
        received = _AllToAll.apply(divided.flatten(1), self._group).view(divided.shape)
        return received.transpose(0, 1).flatten(1, 2)

    def own(self, per_head: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a value for each head, [h / N] of [h]."""
        return per_head.unflatten(0, (self._size, -1))[self._rank]


class _AllToAll(torch.autograd.Function):
    """Exchange row i of [N, n] with rank i. The backward pass is the same exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return exchanged(rows, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return exchanged(grad_outputs[0], ctx.group), None


def exchanged(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Return [N, n], whose row i is this rank's row of rank i.

    Args:
        rows: [N, n]; row i is for rank i.
        group: process group of N ranks.
    """
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, rows.contiguous(), group=group)
    return received
