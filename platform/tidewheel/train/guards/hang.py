"""Turn a rank that hangs into an error that names it, in bounded time.

Each rank marks its step and phase in memory. A thread of its own publishes the mark in the ranks' shared store every
few seconds, so that no step waits for the network. A rank without progress for the configured time (neither a new
mark nor a new collective) surveys all ranks. A rank is behind if its thread is silent (the process is stopped,
swapped out or gone), or if its marks or collectives are fewer than the others'. Each rank without progress also
publishes its newest collectives, their number at its newest marks, and its stack; from these `hang_blame` says which
rank started the hang, also if a rank took another way than the others. If no rank is behind or took another way, all
ranks do long work and training continues. Otherwise the waiting rank ends: the collective that it waits in times out
and raises (gloo), or is aborted (NCCL, whose watchdog raises nothing here; see `cuda_environment`). Failing that, the
rank's process ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tidewheel.train.guards.collective_records import MarkCount, RankRecord, own_record
from tidewheel.train.guards.config import GuardsConfig
from tidewheel.train.guards.hang_blame import Fault, blame
from tidewheel.train.logs import worker_log

logger = logging.getLogger(__name__)

BEATS = 12
"""Beats in the time limit; a survey takes two and a half of them."""
MOST_SECONDS = 5.0
"""Longest time between two beats."""
CLOSE_SECONDS = 0.5
MOST_RECORDS = 1024
"""With more ranks only the beats are compared: a record has about 20 kB, and one rank reads those of all."""
MARKS = 64
"""Newest marks of which a rank knows how many collectives it had started."""
EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""


class HangError(RuntimeError):
    """Ranks waited in vain for other ranks, which the text names. A restart fixes it, as after the loss of a worker.

    Args:
        text: what was found.
        ranks: the ranks that are behind.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class Finding(NamedTuple):
    """Result of a survey of all ranks."""

    text: str
    """Text that names the ranks that are behind; "" if all are level."""
    ranks: tuple[int, ...] = ()
    """The ranks that are behind."""


class Beat(NamedTuple):
    """A rank's report of its progress."""

    number: int
    """Rises as long as the process lives."""
    marks: int
    """Number of marks so far; ranks at the same point have the same number."""
    step: int
    phase: str
    collectives: dict[str, int]
    """Collectives started so far, by process group."""

    @property
    def progress(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Value that changes when the rank makes progress."""
        return self.marks, tuple(sorted(self.collectives.items()))


class Watch:
    """Watches the ranks of a run; does nothing for a single rank.

    Args:
        config: time limits.
        rank: of this process in the default group.
        world_size: ranks to watch.
        name: distinguishes this watch from others in the same store.
        on_hang: called with the finding, on the rank that surveyed; must be quick.
        break_off: makes this rank's collectives end, for backends whose collectives have no time limit.
    """

    def __init__(self, config: GuardsConfig, rank: int, world_size: int, *, name: str = "0",
                 on_hang: Callable[[str], None] | None = None,
                 break_off: Callable[[], None] = lambda: None) -> None:
        self._config, self._rank, self._world_size, self._on_hang = config, rank, world_size, on_hang
        self._break_off = break_off
        self._marks, self._place = 0, (0, "start")
        self._counts: deque[MarkCount] = deque(maxlen=MARKS)
        self._finding = Finding("")
        self._found, self._closed = threading.Event(), threading.Event()
        self._limit = config.start_timeout_seconds
        self._beat_seconds = min(min(config.collective_timeout_seconds, self._limit) / BEATS, MOST_SECONDS)
        self._thread: threading.Thread | None = None
        if world_size > 1:
            self._groups: list[Any] = [distributed_c10d._get_default_group()]
            self._labels, self._program = _labelled(self._groups), 0
            self._times_out = dist.get_backend() == "gloo"
            self._set_limits()
            # two connections, because one that waits for an answer would delay the beats
            shared: Any = distributed_c10d._get_default_store()
            self._store, self._answers = (dist.PrefixStore(f"tidewheel/hang/{name}", shared.clone()) for _ in range(2))
            self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
            self._thread.start()

    def include(self, groups: Sequence[Any], program: int = 0) -> None:
        """Watch further process groups, in which all ranks start the same collectives; so no pipeline's.

        Args:
            groups: of this rank.
            program: ranks with the same number start the same collectives in the same order: a pipeline stage.
        """
        if self._thread is not None:
            self._program = program
            self._groups = [self._groups[0], *(group for group in groups if group is not self._groups[0])]
            self._labels = _labelled(self._groups)
            self._set_limits()

    def mark(self, step: int, phase: str) -> None:
        """Mark that this rank is at `phase` of `step`. All ranks make the same marks in the same order."""
        self._place = step, phase
        self._marks += 1
        if self._thread is not None:
            counts = {label: group._get_sequence_number_for_group() for label, group in self._labels.items()}
            self._counts.append(MarkCount(self._marks, step, phase, counts))

    def started(self) -> None:
        """Note that the first step is done; the shorter time limit applies from now on."""
        if self._limit != self._config.collective_timeout_seconds:
            self._limit = self._config.collective_timeout_seconds
            if self._thread is not None:
                self._set_limits()

    def explained(self, error: BaseException) -> BaseException:
        """Return the HangError that says why a collective did not end, or `error` itself."""
        text = str(error).lower()
        waited = isinstance(error, RuntimeError) and ("timed out" in text or "timeout" in text)
        if self._thread is not None and waited:
            self._found.wait(6 * self._beat_seconds)
        return HangError(*self._finding) if self._finding.text and isinstance(error, RuntimeError) else error

    def close(self) -> None:
        """Stop watching, without waiting for a thread that waits for the store: other ranks may wait for this one."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_SECONDS)

    def _set_limits(self) -> None:
        # a collective times out after the survey, so that its error can be explained
        limit = timedelta(seconds=self._limit + 6 * self._beat_seconds)
        for group in self._groups:
            distributed_c10d._set_pg_timeout(limit, group)

    def _beat(self, number: int) -> Beat:
        counts = {group.group_name: group._get_sequence_number_for_group() for group in self._groups}
        return Beat(number, self._marks, *self._place, counts)

    def _publish(self) -> None:
        """Publish what this rank knows of its collectives."""
        labelled = self._labels
        names = {group.group_name: label for label, group in labelled.items()}
        members = {label: dist.get_process_group_ranks(group) for label, group in labelled.items()}
        record = own_record(tuple(self._counts), names, self._program)
        self._store.set(f"record/{self._rank}", json.dumps([self._beat(0), members, record.to_json()]))

    def _run(self) -> None:
        # the process that hosts the store has ended; the collectives raise that themselves
        with contextlib.suppress(RuntimeError):
            self._watch()

    def _watch(self) -> None:
        number, since, before = 0, time.monotonic(), None
        while not self._closed.wait(self._beat_seconds):
            number += 1
            beat = self._beat(number)
            self._store.set(str(self._rank), json.dumps(beat))
            if beat.progress != before:
                before, since = beat.progress, time.monotonic()
            elif time.monotonic() - since > self._limit / 2 and not self._finding.text and (
                    self._world_size <= MOST_RECORDS):
                self._publish()
            if time.monotonic() - since > self._limit and not self._finding.text:
                self._ask()
                since = time.monotonic()
                if self._finding.text:
                    if not self._times_out:
                        self._break_off()
                    threading.Thread(target=self._end, name="hang end", daemon=True).start()

    def _ask(self) -> None:
        """Survey all ranks, or wait for another rank's survey, and keep sending beats."""
        answer: list[Finding] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # no answer
                answer.append(self._survey())

        asking = threading.Thread(target=ask, name="hang survey", daemon=True)
        asking.start()
        number, until = 1 << 32, time.monotonic() + 5 * self._beat_seconds
        while asking.is_alive() and time.monotonic() < until:
            number += 1
            self._store.set(str(self._rank), json.dumps(self._beat(number)))
            asking.join(self._beat_seconds)
        if answer:
            self._finding = answer[0]
        elif not self._closed.is_set():
            self._finding = Finding(
                f"rank {self._rank} has waited {self._limit:g} s at {_position(self._beat(0))}, and the store that the "
                "ranks share does not answer: the process of rank 0, which hosts the store, is stopped or gone")
        if self._finding.text:
            self._found.set()

    def _survey(self) -> Finding:
        """Return the ranks that are behind. One rank surveys for all."""
        turn = self._answers.add("turn", 0)
        if self._answers.compare_set(f"surveyor/{turn}", "", str(self._rank)).decode() != str(self._rank):
            text, ranks = json.loads(self._answers.get(f"finding/{turn}"))
            return Finding(text, tuple(ranks))
        before = self._beats()
        time.sleep(2.5 * self._beat_seconds)
        after = self._beats()
        finding = refined(find(before, after, self._limit), *self._records(after))
        self._answers.set(f"finding/{turn}", json.dumps(finding))
        if not finding.text:
            self._answers.add("turn", 1)
        elif self._on_hang is not None:
            self._on_hang(finding.text)
        return finding

    def _records(self, beats: dict[int, Beat | None]) -> tuple[dict[int, RankRecord], dict[str, tuple[int, ...]]]:
        """Return the records of the ranks that still stand where they published one, and the ranks of each group.

        Args:
            beats: newest beat of each rank.
        """
        records: dict[int, RankRecord] = {}
        members: dict[str, tuple[int, ...]] = {}
        for rank, beat in beats.items():
            if beat is None or not self._answers.check([f"record/{rank}"]):
                continue
            then, groups, text = json.loads(self._answers.get(f"record/{rank}"))
            if Beat(*then).progress == beat.progress:
                records[rank] = RankRecord.from_json(text)
                members |= {label: tuple(ranks) for label, ranks in groups.items()}
        return records, members

    def _beats(self) -> dict[int, Beat | None]:
        """Return the newest beat of each rank, None for a rank without one."""
        beats: dict[int, Beat | None] = {}
        for rank in range(self._world_size):
            has_beat = self._answers.check([str(rank)])
            beats[rank] = Beat(*json.loads(self._answers.get(str(rank)))) if has_beat else None
        return beats

    def _end(self) -> None:
        """End the process unless the main thread ends in time: other processes wait for this one."""
        if not self._closed.wait(8 * self._beat_seconds):
            logger.critical("rank %d ends: %s", self._rank, self._finding.text)
            worker_log.last_words()
            os._exit(EXIT_CODE)


def find(before: dict[int, Beat | None], after: dict[int, Beat | None], seconds: float) -> Finding:
    """Return the ranks that are behind, from two surveys of all ranks a few beats apart.

    Args:
        before: beats of the first survey by rank; None for a rank that has never sent one.
        after: beats of the second survey.
        seconds: how long the other ranks have waited, for the text.
    """
    silent = [rank for rank, beat in after.items() if beat is None or beat == before[rank]]
    alive = {rank: beat for rank, beat in after.items() if beat is not None and rank not in silent}
    behind = [] if silent else _behind(alive)
    if not silent and not behind:
        return Finding("")
    lines = []
    for rank in silent:
        beat = after[rank]
        last_seen = f", last seen at {_position(beat)}" if beat else " and never did"
        lines.append(f"rank {rank} does not answer{last_seen}")
    lines += [f"rank {rank} is still at {_position(alive[rank])}" for rank in behind]
    waiting = [rank for rank in alive if rank not in behind]
    if waiting:
        waiters = f"rank {waiting[0]} has" if len(waiting) == 1 else f"{len(waiting)} ranks have"
        lines.append(f"{waiters} waited {seconds:g} s at {_position(alive[waiting[0]])}")
    return Finding("; ".join(lines), (*silent, *behind))


def refined(finding: Finding, records: Mapping[int, RankRecord], members: Mapping[str, tuple[int, ...]]) -> Finding:
    """Return a finding with the ranks that started the hang, if the ranks' records tell.

    Args:
        finding: from the beats.
        records: of the ranks that published one; without all of them, only the beats count.
        members: ranks of each group.
    """
    everyone = set().union(*members.values()) if members else set()
    if not everyone or set(records) != everyone:
        return finding
    blamed = blame(records, members, {label: label.partition("@")[0] for label in members})
    if not blamed.ranks or (not finding.text and blamed.fault is not Fault.MISMATCH):
        return finding
    if set(blamed.ranks) != set(finding.ranks):  # the beats name ranks that only wait
        return Finding(blamed.text, blamed.ranks)
    return Finding(f"{finding.text}; {blamed.text}", blamed.ranks)


def _labelled(groups: Sequence[Any]) -> dict[str, Any]:
    """Return the groups by a label that their ranks share: the kind of the group, and its first rank."""
    return {f"{_kind(place)}@{dist.get_process_group_ranks(group)[0]}": group for place, group in enumerate(groups)}


def _kind(place: int) -> str:
    """Return the kind of a group from its place among those that a rank watches."""
    return f"group {place}" if place else "all ranks"


def _behind(beats: dict[int, Beat]) -> list[int]:
    """Return the ranks with the fewest marks; if all are equal, those that began fewer collectives than their group."""
    most = max((beat.marks for beat in beats.values()), default=0)
    late = [rank for rank, beat in beats.items() if beat.marks < most]
    if late:
        least = min(beats[rank].marks for rank in late)
        return [rank for rank in late if beats[rank].marks == least]
    begun: dict[str, int] = {}
    for beat in beats.values():
        for group, count in beat.collectives.items():
            begun[group] = max(begun.get(group, 0), count)
    return [rank for rank, beat in beats.items() if any(count < begun[g] for g, count in beat.collectives.items())]


def _position(beat: Beat) -> str:
    return f"step {beat.step} ({beat.phase})"
