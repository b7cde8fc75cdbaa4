"""Batches by position: the order says which rows, the shard set gives them."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tidewheel.shards.order import Order
from tidewheel.shards.reader import Rows, ShardSet


class Loader:
    """Reads batches, and reads ahead when positions advance evenly.

    Args:
        shard_set: an open shard set.
        order: an order over the rows of that set.
        prefetch: batches read ahead on a thread; 0 reads when asked.
    """

    def __init__(self, shard_set: ShardSet, order: Order, *, prefetch: int = 2) -> None:
        self._set, self._order, self._prefetch = shard_set, order, prefetch
        self._pending: OrderedDict[bytes, Future[Rows]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._last: np.ndarray | None = None

    def batch(self, positions: np.ndarray) -> Rows:
        """The sequences at `positions` (int64, any epoch), in that order."""
        positions = np.asarray(positions, dtype=np.int64)
        waiting = self._pending.pop(positions.tobytes(), None)
        rows = waiting.result() if waiting is not None else self._read(positions)
        self._read_ahead(positions)
        return rows

    def _read(self, positions: np.ndarray) -> Rows:
        return self._set.rows(*self._order.locate(positions))

    def _read_ahead(self, positions: np.ndarray) -> None:
        """Guess the next batches: the same shape, moved on by the stride of the last two."""
        last, self._last = self._last, positions
        if self._prefetch < 1 or last is None or last.shape != positions.shape or not positions.size:
            return
        stride = int(positions[0] - last[0])
        if stride <= 0 or not np.array_equal(positions - last, np.full_like(positions, stride)):
            return
        wanted = {(positions + stride * ahead).tobytes(): positions + stride * ahead
                  for ahead in range(1, self._prefetch + 1)}
        for stale in [name for name in self._pending if name not in wanted]:
            self._pending.pop(stale).cancel()
        for name, ahead_positions in wanted.items():
            if name not in self._pending:
                self._pending[name] = self._thread.submit(self._read, ahead_positions)

    def close(self) -> None:
        """Stop reading ahead."""
        self._thread.shutdown(wait=True, cancel_futures=True)
