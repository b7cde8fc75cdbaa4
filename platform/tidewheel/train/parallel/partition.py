"""Divide the positions of each row among context ranks so that attention costs every rank the same.

A row is cut into blocks of neighbouring positions. Every rank gets the same number of blocks, because everything but
attention costs the same for each position. `zigzag` gives rank i of N the pieces i and 2N-1-i of 2N: even for a row of
one document (Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2), but not for packed documents, where the queries
of a long document cost more than those of short ones wherever they lie. `documents` takes neighbouring positions or the
pieces of `zigzag` if these are even, and otherwise deals the blocks by their cost, the most expensive first, each to
the rank with the least cost so far. The order of tokens in the data does not change.

Only numpy: the host computes it from the document layout of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

Balance = Literal["documents", "zigzag"]
EVEN = 1.02
"""Up to this largest cost over the mean, a row is cut into few long pieces, which make few tiles and short ways."""
BLOCK, SMALLEST, BLOCKS_PER_RANK = 128, 16, 8
"""A block of flash attention's kernels; the smallest block; the number of blocks of a rank below which blocks are
smaller than `BLOCK`."""


def block_size(length: int, size: int) -> int:
    """Return the number of positions in a block: it divides length / (2 size).

    Args:
        length: of a row, a multiple of 2 x `size`.
        size: number of context ranks.
    """
    piece = length // (2 * size)
    most = min(BLOCK, max(SMALLEST, length // (BLOCKS_PER_RANK * size)))
    return max(divisor for divisor in range(1, min(piece, most) + 1) if piece % divisor == 0)


def visible_keys(starts: np.ndarray, windows: Iterable[int | None]) -> np.ndarray:
    """Return how many keys each query sees, summed over layers, int64 [B, L].

    Args:
        starts: int64 [B, L], for each position the position at which its document begins.
        windows: of each layer; None: a query sees all earlier tokens of its document.
    """
    whole = np.arange(starts.shape[1]) - starts + 1
    total = np.zeros_like(whole)
    counted: dict[int | None, int] = {}
    for window in windows:
        counted[window] = counted.get(window, 0) + 1
    for window, layers in counted.items():
        total += layers * (whole if window is None else np.minimum(whole, window))
    return total


def starts_of(offsets: np.ndarray, rows: int, length: int) -> np.ndarray:
    """Return for each position the position in its row at which its document begins, int64 [rows, length].

    Args:
        offsets: see `models.documents.Documents`.
        rows: B.
        length: L.
    """
    begins = np.zeros(rows * length, dtype=np.int64)
    first = offsets[offsets < rows * length]
    begins[first] = first
    starts = np.maximum.accumulate(begins).reshape(rows, length)
    return starts - np.arange(rows)[:, None] * length


def zigzag(length: int, size: int) -> np.ndarray:
    """Return the positions of each rank, rising: int64 [size, length / size].

    Args:
        length: of a row, a multiple of 2 x `size`.
        size: number of context ranks.
    """
    pieces = np.arange(length).reshape(2 * size, -1)
    return np.concatenate((pieces[:size], pieces[:size - 1:-1]), axis=1)


def contiguous(length: int, size: int) -> np.ndarray:
    """Return the positions of each rank, one piece each: int64 [size, length / size]."""
    return np.arange(length).reshape(size, -1)


def divide(costs: np.ndarray, size: int, balance: Balance = "documents") -> np.ndarray:
    """Return the positions of each rank in each row, rising: int64 [size, B, L / size].

    Args:
        costs: of each position, int64 [B, L].
        size: number of context ranks.
        balance: by the costs, or the same pieces in every row.
    """
    rows, length = costs.shape
    if balance == "zigzag":
        return np.repeat(zigzag(length, size)[:, None], rows, axis=1)
    return np.stack([_divide_row(row_costs, size) for row_costs in costs], axis=1)


def _divide_row(costs: np.ndarray, size: int) -> np.ndarray:
    """Return the positions of each rank in one row, int64 [size, L / size], in as few pieces as are even enough."""
    block = block_size(len(costs), size)
    sums = costs.reshape(-1, block).sum(axis=1)
    candidates = [contiguous(len(costs), size), zigzag(len(costs), size), _positions(_deal(sums, size), size, block)]
    largest = [costs[positions].sum(axis=1).max() for positions in candidates]
    enough = max(EVEN * costs.sum() / size, min(largest))
    return next(positions for positions, most in zip(candidates, largest) if most <= enough)


def _deal(costs: np.ndarray, size: int) -> np.ndarray:
    """Return the rank of each block, int64 [n]: n / size blocks for each, the most expensive first.

    Args:
        costs: of each block, int64 [n].
        size: number of ranks.
    """
    owners = np.empty(len(costs), dtype=np.int64)
    loads, room = np.zeros(size), np.full(size, len(costs) // size)
    for block in np.argsort(-costs, kind="stable"):
        rank = int(np.argmin(np.where(room > 0, loads, np.inf)))
        owners[block] = rank
        loads[rank] += costs[block]
        room[rank] -= 1
    return owners


def _positions(owners: np.ndarray, size: int, block: int) -> np.ndarray:
    """Return the positions of each rank, int64 [size, L / size], from the rank of each block."""
    blocks = np.argsort(owners, kind="stable").reshape(size, -1)
    return (blocks[..., None] * block + np.arange(block)).reshape(size, -1)


def imbalance(costs: np.ndarray, divided: np.ndarray) -> float:
    """Return the cost of the busiest rank over the mean, summed over rows that ranks compute one after another.

    Args:
        costs: of each position, int64 [B, L].
        divided: int64 [size, B, L / size].
    """
    shares = np.array([np.take_along_axis(costs, part, axis=1).sum() for part in divided], dtype=np.float64)
    return float(shares.max() / shares.mean())


def pairs(queries: np.ndarray, keys: np.ndarray, starts: np.ndarray, window: int | None) -> int:
    """Return the number of pairs of a query and a key that it sees.

    Args:
        queries: their positions in each row, int64 [B, Q].
        keys: their positions, rising, int64 [B, K].
        starts: see `visible_keys`.
        window: of a layer.
    """
    lowest = np.take_along_axis(starts, queries, axis=1)
    if window is not None:
        lowest = np.maximum(lowest, queries - window + 1)
    return sum(int((np.searchsorted(of_keys, of_queries, side="right") - np.searchsorted(of_keys, first)).clip(0).sum())
               for first, of_queries, of_keys in zip(lowest, queries, keys))


def hops(divided: np.ndarray, starts: np.ndarray, window: int | None) -> int:
    """Return for how many hops, from 0 on, some rank sees the keys that made them.

    Args:
        divided: see `divide`.
        starts: see `visible_keys`.
        window: of a layer.
    """
    size = len(divided)
    for count in range(size, 1, -1):
        if any(pairs(divided[rank], divided[(rank - count + 1) % size], starts, window) for rank in range(size)):
            return count
    return 1
