"""Give a slow worker fewer virtual ranks, so that the others do not wait for it.

In reproducible mode the result has the same bits: the gradient of a virtual rank does not depend on who computes it.
Otherwise it differs in the last digits, as between numbers of workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from tidewheel.train.batches import BatchDigest
from tidewheel.train.training import Training

GAIN = 0.05
"""Least share of the passes' time that other shares must save. Readings of equal workers differ by a few percent."""


def shares(seconds: Sequence[float], virtual_ranks: int) -> tuple[int, ...]:
    """Return the number of virtual ranks of each worker with which the slowest is done soonest.

    Each virtual rank in turn goes to the worker that is then done first, which is optimal for equal jobs.

    Args:
        seconds: of each worker for a virtual rank, positive.
        virtual_ranks: of the run, at least one for each worker.
    """
    counts = [1] * len(seconds)
    done = [(2 * each, worker) for worker, each in enumerate(seconds)]  # with one more
    heapq.heapify(done)
    for _ in range(virtual_ranks - len(seconds)):
        at, worker = done[0]
        counts[worker] += 1
        heapq.heapreplace(done, (at + seconds[worker], worker))
    return tuple(counts)


def better(seconds: Sequence[float], now: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shares to take instead of those of now; None if they would save less than `GAIN`.

    Args:
        seconds: of each worker for a virtual rank.
        now: virtual ranks of each.
    """
    if min(seconds) <= 0:  # a worker has measured nothing
        return None
    best = shares(seconds, sum(now))
    return best if _slowest(seconds, best) < (1 - GAIN) * _slowest(seconds, now) else None


def _slowest(seconds: Sequence[float], counts: Sequence[int]) -> float:
    return max(each * count for each, count in zip(seconds, counts))


class SpeedShares:
    """Looks at the workers' speeds every few steps, and gives them other shares if that is faster.

    Args:
        training: this worker's share of the run. Every worker is a data rank of its own.
        digest: of the batches that are read.
    """

    def __init__(self, training: Training, digest: BatchDigest) -> None:
        self._training, self._digest = training, digest
        self._every = training.config.elastic.share_by_speed_every_steps
        size = training.model.mesh.data_size
        self._now = [training.config.batch.virtual_ranks // size] * size
        self._steps = 0
        self._measures = self._every > 0 and size > 1
        if self._measures:
            training.model.pass_time.open(training.device)

    def step(self) -> None:
        """Look, if a look is due. All ranks call it at the end of each step, and take new shares from the next on."""
        if not self._measures:
            return
        self._steps += 1
        if self._steps % self._every:
            return
        training = self._training
        parts = training.config.batch.micro_batches(1)[-1] / training.config.batch.virtual_ranks
        own = int(training.model.pass_time.read() * parts * 1e9)
        gathered = training.collectives.gather_all(torch.tensor([own]))
        decided = torch.zeros(len(self._now), dtype=torch.float64)
        seconds = [] if gathered is None else [each / 1e9 for each in gathered.tolist()]
        if seconds and (found := better(seconds, self._now)) is not None:
            decided = torch.tensor(found, dtype=torch.float64)
        counts = [int(count) for count in training.collectives.to_host(training.collectives.sum(decided)).tolist()]
        if not any(counts):
            return
        training.event("shares", virtual_ranks=counts, before=self._now,
                       seconds=[round(each, 6) for each in seconds])
        self._now = counts
        training.model.take_share(counts)
        training.reader.take_share(training.model.share)
        self._digest.take_share(training.model.share)
