"""Expert parallelism's exchange: each row travels to the rank of its expert, and the result travels back.

Suffixes of names give shapes: R rows that this rank sends, N rows that it receives, S source ranks, E experts, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo  # unlike `torch.compiler.disable`, it imports the compiler when it is needed

from tidewheel.models.moe.experts import Experts


class AllToAll:
    """A `Dispatch` over the S ranks that share the experts of a layer; rank i has the i-th part of them.

    Every rank sends the numbers of its rows, then the rows, dropless: a rank may receive any number. The host reads the
    numbers once. Source ranks sort their rows by expert, so the received rows are sorted by source, then by expert.
    Unless the sources must stay apart, they are sorted by expert, which makes the grouped products larger.

    All ranks must call it in the same order, also when activation checkpointing recomputes a block. The backward pass
    reuses the numbers.

    Args:
        group: process group of the ranks.
        size: S.
        apart: compute the rows of each source by themselves, for reproducible mode.
    """

    def __init__(self, group: Any, size: int, *, apart: bool = False) -> None:
        self._group, self._size, self._apart = group, size, apart

    @_disable_dynamo  # the number of rows is known when it runs; the rest of a block is compiled
    def __call__(self, experts: Experts, rows_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all experts for this rank's rows, [R, D].

        Args:
            experts: this rank's part of the experts.
            rows_RD: sorted by expert.
            counts_E: int64, rows for each of all experts; they add up to R.
        """
        table_SE, sent, table = self._counts(counts_E)
        received = table.sum(dim=1).tolist()
        rows_ND = _Exchange.apply(rows_RD, self._group, sent, received)
        if self._apart:
            computed_ND = experts(rows_ND, table)
        else:
            order, inverse = _by_expert(table_SE, len(rows_ND))
            sorted_ND = experts(_Permute.apply(rows_ND, order, inverse), table_SE.sum(dim=0, keepdim=True))
            computed_ND = _Permute.apply(sorted_ND, inverse, order)
        return _Exchange.apply(computed_ND, self._group, received, sent)

    def _counts(self, counts_E: torch.Tensor) -> tuple[torch.Tensor, list[int], torch.Tensor]:
        """Return the rows of each source for each expert of this rank, int64 [S, E / S], on the device and on the host.

        Between them are the numbers of rows that each rank gets. The host waits once.
        """
        table_SE = torch.empty_like(counts_E).view(self._size, -1)
        dist.all_to_all_single(table_SE.view(-1), counts_E, group=self._group)
        sent_S = counts_E.view(self._size, -1).sum(dim=1, keepdim=True)
        numbers = torch.cat((sent_S, table_SE), dim=1).cpu()
        return table_SE, numbers[:, 0].tolist(), numbers[:, 1:]


def _by_expert(table_SE: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stable order by expert of N rows that are sorted by source, then by expert, and its inverse."""
    experts = torch.arange(table_SE.shape[1], device=table_SE.device).expand_as(table_SE).flatten()
    order = experts.repeat_interleave(table_SE.flatten(), output_size=rows).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(rows, device=order.device)
    return order, inverse


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, `sent[i]` to rank i; the gradient travels back."""

    @staticmethod
    def forward(ctx: Any, rows_RD: torch.Tensor, group: Any, sent: Sequence[int],
                received: Sequence[int]) -> torch.Tensor:
        ctx.settings = group, received, sent
        return _exchanged(rows_RD, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return _exchanged(grad_outputs[0], *ctx.settings), None, None, None


def _exchanged(rows_RD: torch.Tensor, group: Any, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    arrived = rows_RD.new_empty(sum(received), *rows_RD.shape[1:])
    dist.all_to_all_single(arrived, rows_RD.contiguous(), list(received), list(sent), group=group)
    return arrived


class _Permute(torch.autograd.Function):
    """Rows in another order. The gradient is a gather too; that of an index would be added up."""

    @staticmethod
    def forward(ctx: Any, rows_ND: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.inverse = inverse
        return rows_ND[order]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return grad_outputs[0][ctx.inverse], None, None
