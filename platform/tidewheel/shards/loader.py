"""Read batches by position, ahead of the training step."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future

import numpy as np

from tidewheel.daemon import DaemonThread
from tidewheel.shards.reader import Rows
from tidewheel.shards.source import SourceReader


class Loader:
    """Rows of a source by global position, in any order. Its only state is what it has read ahead.

    Args:
        reader: where rows come from.
        prefetch: number of batches that a thread reads ahead, assuming that the next calls are as far apart as the last
            two; 0: none. A wrong guess costs a read and nothing else.
    """

    def __init__(self, reader: SourceReader, *, prefetch: int = 2) -> None:
        self._reader, self._end, self._prefetch = reader, reader.source.end, prefetch
        self._read = reader.read
        self._ahead: OrderedDict[bytes, Future[Rows]] = OrderedDict()
        self._last: np.ndarray | None = None
        self._thread = DaemonThread("shards") if prefetch else None

    def batch(self, positions: np.ndarray) -> Rows:
        """Return the rows at `positions`. Not safe for concurrent use with `prefetch`.

        Args:
            positions: int64 [B].

        Raises:
            ShardError: a shard is missing or damaged.
        """
        positions = np.ascontiguousarray(positions, dtype=np.int64)
        if self._thread is None:
            return self._read(positions)
        future = self._ahead.pop(positions.tobytes(), None)
        rows = None if future is None else future.result()
        if rows is None:  # not predicted: what was read ahead is for other positions
            self._forget()
            rows = self._read(positions)
        self._read_ahead(self._thread, positions)
        return rows

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens of the sequences at `positions`, int32 [B]; see `SourceReader.lengths`."""
        return self._reader.lengths(positions)

    def attention_pairs(self, positions: np.ndarray) -> np.ndarray:
        """Return the pairs of tokens that attention computes, int64 [B]; see `SourceReader.attention_pairs`."""
        return self._reader.attention_pairs(positions)

    def domains(self, positions: np.ndarray) -> np.ndarray:
        """Return the index of the domain of each of `positions`, int64 [B]; see `Source.visits`."""
        return self._reader.source.visits(positions)[0]

    @property
    def reach(self) -> int | None:
        """Positions below this can be read now; see `Source.reach`."""
        return self._reader.source.reach

    def settle(self) -> None:
        """Return once all shards read so far are known to be intact.

        Raises:
            ShardError: one is damaged.
        """
        self._reader.settle()

    def close(self) -> None:
        """Stop the threads, without waiting for a read that is under way."""
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
            predicted = positions + distance * stride
            past_end = end is not None and predicted.max() >= end
            if predicted.min() >= 0 and not past_end and predicted.tobytes() not in self._ahead:
                self._ahead[predicted.tobytes()] = thread.submit(self._read, predicted)
