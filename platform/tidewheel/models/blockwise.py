"""Blockwise attention in plain torch: it computes only the tiles of queries and keys in which something is visible.

The keys that a query sees are an interval of its row: those of its document that are not later than itself and not
beyond the window. So a block of queries needs one contiguous range of keys, and time is proportional to the scores that
exist, not to the square of the length. Scores are never kept: the backward pass computes them again from the logarithm
of the softmax's sum, as flash attention does (https://arxiv.org/abs/2205.14135, algorithm 1, and 2307.08691, section
3.1). Memory is linear in the length.

`ring` and the exchange of keys use `forward` and `backward` piece by piece: both take the normaliser of the whole
softmax, and gradients of all pieces add up.

Letters: B rows, H query heads, K key heads, Q queries, L keys, E width of queries and keys, V width of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

QUERIES, KEYS = 128, 512
"""Queries and keys of a tile: 256 KiB of fp32 scores for each head, which stay in a core's cache."""


@dataclass(frozen=True)
class Scores:
    """How scores come from products.

    Args:
        scale: factor of the products.
        cap: bound of soft-capping, cap tanh(x / cap) (https://arxiv.org/abs/2408.00118, section 2); 0: none.
    """

    scale: float
    cap: float = 0.0


@dataclass(frozen=True)
class Tile:
    """Queries [start, end) and keys [first, last) of one row.

    Args:
        row: of the batch.
        start: first query.
        end: behind the last query.
        first: first key.
        last: behind the last key.
        whole: whether every query sees every key.
    """

    row: int
    start: int
    end: int
    first: int
    last: int
    whole: bool


@dataclass(frozen=True)
class Intervals:
    """Which keys each query sees: keys first[b, i] to last[b, i] - 1, perhaps none.

    Args:
        first: int64 [B, Q].
        last: int64 [B, Q], not below `first`.
    """

    first: torch.Tensor
    last: torch.Tensor

    @property
    def scores(self) -> int:
        """Return the number of visible pairs of query and key, of one head."""
        return int((self.last - self.first).sum())

    def dense(self, keys: int) -> torch.Tensor:
        """Return the mask bool [B, 1, Q, L], True where query i sees key j.

        Args:
            keys: number of keys, L.
        """
        index = torch.arange(keys, device=self.first.device)
        return ((index >= self.first[..., None]) & (index < self.last[..., None]))[:, None]


class Blockwise:
    """Attention over keys that this process has; a `Plan`.

    The host finds the tiles in which something is visible once for all layers.

    Args:
        seen: which keys each query sees.
    """

    def __init__(self, seen: Intervals) -> None:
        self.seen = seen
        first, last = seen.first.cpu().numpy(), seen.last.cpu().numpy()
        blocks = []
        for row in range(len(first)):
            for start in range(0, first.shape[1], QUERIES):
                part = slice(start, start + QUERIES)
                blocks.append(list(_tiles(row, start, first[row, part], last[row, part])))
        self.blocks = [block for block in blocks if block]
        """A list of tiles for each block of queries."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention over the given keys and the logarithms of the softmax's sums.

        Args:
            q: [B, H, Q, E].
            k: [B, K, L, E]; head h of q uses head h // (H / K).
            v: [B, K, L, V].
            scores: scale and cap.

        Returns:
            fp32 [B, H, Q, V], zeros where a query sees no key; and fp32 [B, H, Q], there minus infinity.
        """
        rows, heads, queries, _ = q.shape
        out = q.new_zeros(rows, heads, queries, v.shape[-1], dtype=torch.float32)
        lse = q.new_full((rows, heads, queries), -torch.inf, dtype=torch.float32)
        for block in self.blocks:
            row, part = block[0].row, slice(block[0].start, block[0].end)
            sums: _Sums | None = None
            for tile in block:
                s, _ = self._scores(q, k, tile, scores)
                sums = _with_tile(sums, s, v[row, :, tile.first:tile.last])
            assert sums is not None
            largest, total, added = sums
            shape = (heads, part.stop - part.start, -1)
            out[row, :, part] = (added / total.clamp(min=1e-30)).view(shape)
            lse[row, :, part] = (largest + total.log()).view(shape[:2])
        return out, lse

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor,
                 delta: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v by these keys, fp32.

        Args:
            grad: gradient of the whole output, [B, H, Q, V].
            q: see `forward`.
            k: see `forward`.
            v: see `forward`.
            lse: of the softmax over all keys, [B, H, Q].
            delta: sum over V of gradient x output, less the gradient of `lse`; [B, H, Q].
            scores: see `forward`.
        """
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        heads = k.shape[1]
        for block in self.blocks:
            row, part = block[0].row, slice(block[0].start, block[0].end)
            shape = (heads, q.shape[1] // heads * (part.stop - part.start), -1)
            queries, gradient = q[row, :, part].reshape(shape), grad[row, :, part].reshape(shape)
            normaliser, mean = lse[row, :, part].reshape(shape), delta[row, :, part].reshape(shape)
            added = torch.zeros_like(queries, dtype=torch.float32)
            for tile in block:
                keys, values = k[row, :, tile.first:tile.last], v[row, :, tile.first:tile.last]
                s, slope = self._scores(q, k, tile, scores)
                p = s.sub_(normaliser).exp_()
                dv[row, :, tile.first:tile.last] += torch.matmul(p.to(grad.dtype).mT, gradient)
                ds = torch.matmul(gradient, values.mT).float().sub_(mean).mul_(p)
                ds = (ds if slope is None else ds.mul_(slope)).mul_(scores.scale).to(q.dtype)
                added += torch.matmul(ds, keys)
                dk[row, :, tile.first:tile.last] += torch.matmul(ds.mT, queries)
            dq[row, :, part] = added.view(q.shape[1], part.stop - part.start, -1)
        return dq, dk, dv

    def _scores(self, q: torch.Tensor, k: torch.Tensor, tile: Tile,
                scores: Scores) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scores of a tile, fp32 [K, H / K x queries, keys], and the derivative of soft-capping or None."""
        heads, queries = k.shape[1], tile.end - tile.start
        grouped = q[tile.row, :, tile.start:tile.end].reshape(heads, -1, q.shape[-1])
        s = torch.matmul(grouped, k[tile.row, :, tile.first:tile.last].mT).float().mul_(scores.scale)
        slope = None
        if scores.cap:
            s = s.div_(scores.cap).tanh_()
            slope = 1 - s * s
            s = s.mul_(scores.cap)
        hidden = self._mask(tile)
        if hidden is not None:
            s.view(heads, -1, queries, s.shape[-1]).masked_fill_(hidden, -torch.inf)
        return s, slope

    def _mask(self, tile: Tile) -> torch.Tensor | None:
        """Return what is not visible in a tile, bool [queries, keys]; None: everything is visible."""
        if tile.whole:
            return None
        index = torch.arange(tile.first, tile.last, device=self.seen.first.device)
        part = slice(tile.start, tile.end)
        first, last = self.seen.first[tile.row, part, None], self.seen.last[tile.row, part, None]
        return (index < first) | (index >= last)


_Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of some queries and the keys so far, fp32: the largest score m [K, n, 1], the sum of exp(score - m) [K, n, 1], and
the sum of exp(score - m) x value [K, n, V]."""


def _with_tile(before: _Sums | None, s: torch.Tensor, values: torch.Tensor) -> _Sums:
    """Return the sums with the keys of one more tile.

    Args:
        before: None: there are no keys yet.
        s: scores [K, n, keys]; minus infinity where nothing is visible. They are overwritten.
        values: [K, keys, V].
    """
    largest = s.amax(dim=-1, keepdim=True).clamp(min=-1e30)  # a row of the tile may see nothing
    if before is not None:
        largest = torch.maximum(largest, before[0])
    p = s.sub_(largest).exp_()
    total, added = p.sum(dim=-1, keepdim=True), torch.matmul(p.to(values.dtype), values).float()
    if before is not None:
        shrink = (before[0] - largest).exp()
        total, added = total + before[1] * shrink, added + before[2] * shrink
    return largest, total, added


def _tiles(row: int, start: int, first: np.ndarray, last: np.ndarray) -> Iterator[Tile]:
    """Yield the tiles of a block of queries, whose intervals are `first` and `last`, int64 [n] each."""
    seeing = first < last
    if not seeing.any():
        return
    lowest, highest = int(first[seeing].min()), int(last[seeing].max())
    everyone = (int(first.max()), int(last.min()))  # the keys that all queries see
    for begin in range(lowest, highest, KEYS):
        end = min(begin + KEYS, highest)
        if not (seeing & (first < end) & (last > begin)).any():
            continue
        yield Tile(row, start, start + len(first), begin, end, everyone[0] <= begin and end <= everyone[1])


def key_intervals(segment_ids: torch.Tensor, places: torch.Tensor, key_places: torch.Tensor | None = None,
            window: int | None = None) -> Intervals:
    """Return which keys each query sees, by the index of the key among `key_places`.

    Args:
        segment_ids: integers [B, N] of whole rows; a document is contiguous.
        places: int64 [B, Q], the index of each query in its row.
        key_places: int64 [B, L], rising, the indices of the keys; default: all of the row.
        window: number of tokens that a token sees, itself included; None: all earlier ones of its document.
    """
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    starts = torch.where(begins, index, 0).cummax(dim=1).values
    lowest = starts.gather(1, places)
    if window is not None:
        lowest = torch.maximum(lowest, places - window + 1)
    if key_places is None:
        return Intervals(lowest, places + 1)
    key_places = key_places.contiguous()
    first = torch.searchsorted(key_places, lowest.contiguous())
    last = torch.searchsorted(key_places, places.contiguous(), right=True)
    return Intervals(first, last)
