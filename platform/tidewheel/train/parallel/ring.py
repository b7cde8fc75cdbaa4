"""Ring attention: keys and values go from rank to rank, and no rank ever holds those of a whole row.

Each context rank attends with its own queries to the keys that it holds, and passes these on to the next rank while it
computes (https://arxiv.org/abs/2310.01889). Results of the pieces are merged by the logarithms of their softmax sums.
The backward pass sends keys and values round again, and with them their gradients, which each rank adds to; they go
home at the end. A rank holds two pieces of keys at a time, and in the backward pass two of gradients.

Masks are exact: a piece that a rank's queries cannot see, because of a window, a document's beginning or their order,
is passed on but not computed. If nobody sees the pieces of ranks further away, as with windows over neighbouring
positions, keys do not travel that far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tidewheel.models.attention_operator import Plan
from tidewheel.models.blockwise import Scores

Arrival = Callable[[], torch.Tensor]
"""Waits for an exchange, and returns the tensor that arrived."""


class Ring:
    """Attention over the keys of all context ranks; a `Plan`.

    Args:
        pieces: for each number of hops, the attention of this rank's queries to the keys that have made them, which are
            those of rank - hops; None: no query sees any. Every rank of the group has as many pieces.
        group: process group of the context ranks.
        rank: in the group.
        size: number of context ranks.
    """

    def __init__(self, pieces: Sequence[Plan | None], group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._pieces = list(pieces)
        self._group, self._rank, self._size = group, rank, size

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the logarithms of the softmax's sums; see `Plan`.

        Args:
            q: this rank's queries, [B, H, Q, E].
            k: its keys, [B, K, L, E].
            v: its values, [B, K, L, V].
            scores: scale and cap.
        """
        width = k.shape[-1]
        held = torch.cat((k, v), dim=-1)
        out, lse = None, None
        for hops, piece in enumerate(self._pieces):
            arriving = self._pass_on(held, hops)
            if piece is not None:
                result = piece.forward(q, held[..., :width], held[..., width:], scores)
                out, lse = result if out is None or lse is None else merged(out, lse, *result)
            if arriving is not None:
                held = arriving()
        assert out is not None
        assert lse is not None
        return out, lse

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor,
                 delta: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of this rank's queries, keys and values, fp32; see `Plan`.

        Args:
            grad: gradient of the output, [B, H, Q, V].
            q: see `forward`.
            k: see `forward`.
            v: see `forward`.
            lse: of the softmax over all keys, [B, H, Q].
            delta: see `Blockwise.backward`.
            scores: see `forward`.
        """
        width = k.shape[-1]
        held = torch.cat((k, v), dim=-1)
        dq = torch.zeros_like(q, dtype=torch.float32)
        sums: Arrival | None = None
        for hops, piece in enumerate(self._pieces):
            arriving = self._pass_on(held, hops)
            if piece is None:
                own = torch.zeros_like(held, dtype=torch.float32)
            else:
                dq_piece, dk, dv = piece.backward(grad, q, held[..., :width], held[..., width:], lse, delta, scores)
                dq += dq_piece
                own = torch.cat((dk.float(), dv.float()), dim=-1)
                del dq_piece, dk, dv
            if sums is not None:
                own += sums()  # what earlier ranks have added for the keys that are here now
                sums = None
            if arriving is None:
                own = self._exchange(own, -hops)() if hops else own
                return dq, own[..., :width].clone(), own[..., width:].clone()  # an operator returns no views
            sums = self._exchange(own, 1)
            held = arriving()
        raise AssertionError("a ring has at least one piece")

    def _pass_on(self, held: torch.Tensor, hops: int) -> Arrival | None:
        """Start to send the held keys to the next rank; None after the last hop."""
        return self._exchange(held, 1) if hops + 1 < len(self._pieces) else None

    def _exchange(self, tensor: torch.Tensor, distance: int) -> Arrival:
        """Start to send a tensor `distance` ranks on, and to receive one from as far back.

        Args:
            tensor: contiguous; every rank's has the same shape.
            distance: may be negative.
        """
        received = torch.empty_like(tensor)
        to, source = (self._rank + distance) % self._size, (self._rank - distance) % self._size
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, tensor, group=self._group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=self._group, group_peer=source)])

        def arrival() -> torch.Tensor:
            for work in works:
                work.wait()
            return received

        return arrival


def merged(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor,
           more_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over two sets of keys, from the attention over each.

    Args:
        out: fp32 [B, H, Q, V], over the first set, of which every query sees something.
        lse: fp32 [B, H, Q], the logarithms of its softmax sums.
        more: over the second set.
        more_lse: of the second set; minus infinity where a query sees nothing.
    """
    total = torch.logaddexp(lse, more_lse)
    return (out * (lse - total).exp()[..., None] + more * (more_lse - total).exp()[..., None]), total
