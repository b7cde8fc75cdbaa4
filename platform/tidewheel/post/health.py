"""Notice generators that make no progress, and groups for which it is worth to begin again elsewhere.

An answer to a call proves that a process runs, not that it samples: a thread that answers goes on while the one that
samples hangs. So a generator counts the passes of its model (`Beat`), and while a pass goes on only the next one is
progress. While it reads weights, judges or waits for an environment there is nothing to count, and an answer is. A
process that is stopped gives none. The whole job is limited by its lease besides.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tidewheel.inference.passes import Beat
from tidewheel.post.groups import Job

USUAL = 64
"""Groups whose time tells what is usual."""
SLOW = 2.0
"""A group that takes this many times the median is given to an idle generator, too."""
ASKED_IN_STALL = 8
"""Calls in the time without progress after which a generator is ended."""


@dataclass
class Lease:
    """A job that a generator has."""

    actor: Any
    job: Job
    tries: int
    since: float
    """When it was given."""
    moved: float = field(init=False)
    """When it last made progress, as far as is known."""
    is_late: bool = False
    """Whether another generator was faster."""
    passes: int = -1
    asked: Any = None
    """The call whose answer is awaited; None: there is none."""
    asked_at: float = 0.0

    def __post_init__(self) -> None:
        self.moved = self.since

    @property
    def group(self) -> tuple[int, int]:
        """Return what tells the group that the job makes from others."""
        return self.job.position, self.job.version.number

    def heard(self, beat: Beat, now: float) -> None:
        """Take an answer.

        Args:
            beat: the answer.
            now: the time.
        """
        self.asked = None
        if beat.passes != self.passes or not beat.computes:
            self.moved = now
        self.passes = beat.passes

    def overdue(self, now: float, *, lease_seconds: float, stall_seconds: float) -> str:
        """Return why the generator is to be ended, "" if it is not.

        Args:
            now: the time.
            lease_seconds: limit of the whole job.
            stall_seconds: limit of the time without progress.
        """
        if now - self.since > lease_seconds:
            return f"its lease of {lease_seconds:g} s is over"
        if now - self.moved > stall_seconds:
            return f"no progress for {now - self.moved:.1f} s"
        return ""


class Pace:
    """How long groups take, and which of those that are being made are slow."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=USUAL)

    def took(self, seconds: float) -> None:
        """Take the time of a group that is done."""
        self._seconds.append(seconds)

    def slow(self, leases: Iterable[Lease], now: float) -> Lease | None:
        """Return the lease of the first slow group in the order of the prompts that one generator alone has, or None.

        A group that has cost a process is given to one at a time: it may be to blame.

        Args:
            leases: of all generators.
            now: the time.
        """
        if not self._seconds:
            return None
        limit = SLOW * statistics.median(self._seconds)
        by_group: dict[tuple[int, int], list[Lease]] = {}
        for lease in leases:
            if not lease.is_late:
                by_group.setdefault(lease.group, []).append(lease)
        alone = [several[0] for several in by_group.values() if len(several) == 1]
        slow = [lease for lease in alone if now - lease.since > limit and lease.tries == 1]
        return min(slow, key=lambda lease: lease.group, default=None)
