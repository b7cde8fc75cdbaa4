"""Batches by position, read ahead of the training step."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future

import numpy as np

from tidewheel.daemon import DaemonThread
from tidewheel.shards.reader import Rows
from tidewheel.shards.source import SourceReader


class Loader:
    """Rows of a source by global position. Stateless but for what it has read ahead: any position, any time.

    Args:
        reader: where rows come from.
        prefetch: batches read ahead by a thread, on the guess that the distance between the last two calls stays
            what it was; 0 turns it off. A wrong guess costs a read, nothing else.
    """

    def __init__(self, reader: SourceReader, *, prefetch: int = 2) -> None:
        self._reader, self._end, self._prefetch = reader, reader.source.end, prefetch
        self._read = reader.read
        self._ahead: OrderedDict[bytes, Future[Rows]] = OrderedDict()
        self._last: np.ndarray | None = None
        self._thread = DaemonThread("shards") if prefetch else None

    def batch(self, positions: np.ndarray) -> Rows:
        """Rows at `positions` [B] int64. Not for several threads at once while prefetching.

        Raises:
            ShardError: a shard is missing or damaged.
        """
        positions = np.ascontiguousarray(positions, dtype=np.int64)
        if self._thread is None:
            return self._read(positions)
        found = self._ahead.pop(positions.tobytes(), None)
        rows = None if found is None else found.result()
        if rows is None:  # not foreseen: what was read ahead is for somewhere else
            self._forget()
            rows = self._read(positions)
        self._read_ahead(self._thread, positions)
        return rows

    @property
    def reach(self) -> int | None:
        """Positions below this can be read now, see `Source.reach`."""
        return self._reader.source.reach

    def settle(self) -> None:
        """Return once all that was read is known to be right; ShardError when it is not."""
        self._reader.settle()

    def close(self) -> None:
        """Stop the threads. A read that is under way is left to end by itself."""
        self._forget()
        if self._thread is not None:
            self._thread.stop(wait=False)
        self._reader.close()

    def _forget(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def _read_ahead(self, thread: DaemonThread, positions: np.ndarray) -> None:
        before, self._last = self._last, positions
        if before is None or before.shape != positions.shape or not positions.size:
            return
        stride = positions - before
        end = self._end if self.reach is None else self.reach
        for distance in range(1, self._prefetch + 1):
            wanted = positions + distance * stride
            behind = end is not None and wanted.max() >= end
            if wanted.min() >= 0 and not behind and wanted.tobytes() not in self._ahead:
                self._ahead[wanted.tobytes()] = thread.submit(self._read, wanted)
