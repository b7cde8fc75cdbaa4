"""A small simulator of ranks that run one program of collectives, with faults: what each rank would record of itself.

A collective of a group ends when all its ranks have started the one with its number. Ranks block in it (gloo), or go on
up to the next point where the host reads a result (NCCL).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from tidewheel.train.guards.collective_records import KEPT, Entry, MarkCount, RankRecord

MARKS_KEPT = 64
STEPS = 40


class Op(NamedTuple):
    """One thing that a rank does: a mark, a collective, or a read of results on the host."""

    kind: str
    """mark, collective, read."""
    what: str = ""
    group: str = ""
    step: int = 0


@dataclass
class Cluster:
    """Ranks in a mesh of data-parallel and tensor-parallel groups, each with the same program at first."""

    tensor: int
    data: int
    blocking: bool
    alike: bool
    """All collectives of a kind have one size."""
    members: dict[str, tuple[int, ...]] = field(init=False)
    kinds: dict[str, str] = field(init=False)
    programs: dict[int, list[Op]] = field(init=False)

    def __post_init__(self) -> None:
        world = self.tensor * self.data
        self.members = {"world": tuple(range(world))}
        self.kinds = {"world": "world"}
        if self.tensor > 1:
            for row in range(self.data):
                self.members[f"tensor{row}"] = tuple(range(row * self.tensor, (row + 1) * self.tensor))
                self.kinds[f"tensor{row}"] = "tensor"
        if self.tensor > 1 and self.data > 1:
            for column in range(self.tensor):
                self.members[f"data{column}"] = tuple(range(column, world, self.tensor))
                self.kinds[f"data{column}"] = "data"
        self.programs = {rank: self._program(rank) for rank in range(world)}

    def group(self, rank: int, kind: str) -> str:
        """Return the rank's group of a kind; the world if it has none."""
        return next((name for name, ranks in self.members.items() if self.kinds[name] == kind and rank in ranks),
                    "world")

    def _program(self, rank: int) -> list[Op]:
        tensor, data = self.group(rank, "tensor"), self.group(rank, "data")
        program = []
        for step in range(1, STEPS + 1):
            program.append(Op("mark", "data", step=step))
            program.append(Op("mark", "step", step=step))
            for layer in range(2):
                program.append(Op("collective", "all_gather [64]", tensor, step))
                program.append(Op("collective", "reduce_scatter [128]" if not self.alike else "all_gather [64]", tensor,
                                  step))
                size = 1024 if self.alike else 1024 * (layer + 1)
                program.append(Op("collective", f"all_reduce [{size}]", data, step))
            program.append(Op("collective", "all_reduce [4]", "world", step))
            program.append(Op("mark", "report", step=step))
            program.append(Op("read", step=step))
        return program


@dataclass
class Fault:
    """What is wrong with some ranks."""

    kind: str
    ranks: tuple[int, ...]
    step: int


FAULTS = ("hang", "slow", "stopped", "skipped", "other order", "other size", "other group first", "extra")


STOPS = ("hang", "slow", "stopped")


def inject(cluster: Cluster, kind: str, rng: random.Random) -> Fault:
    """Change the program of one or two ranks; return what was done."""
    world = len(cluster.members["world"])
    few = kind in STOPS and world > 4 and rng.random() < 0.25
    ranks = tuple(sorted(rng.sample(range(world), 2 if few else 1)))
    step = rng.randrange(3, STEPS - 3)
    for rank in ranks:
        program = cluster.programs[rank]
        places = [at for at, op in enumerate(program) if op.step == step and op.kind == "collective"]
        at = rng.choice(places)
        if kind in STOPS:
            program.insert(at, Op("stop", kind))
        elif kind == "skipped":
            del program[at]
        elif kind == "extra":
            program.insert(at, program[at])
        elif kind == "other size":
            program[at] = program[at]._replace(what=program[at].what.replace("]", "0]"))
        else:  # two neighbours that differ: in one group, or of two groups
            same = kind == "other order"
            pairs = [(one, other) for one in places for other in places if one < other
                     and (program[one].group == program[other].group) == same
                     and (program[one].what != program[other].what or not same)]
            if not pairs:  # nothing to exchange in this program: all of a group look alike
                return inject(cluster, "other size", rng)
            one, other = rng.choice(pairs)
            program[one], program[other] = program[other], program[one]
    return Fault(kind, ranks, step)


class Run:
    """Runs the programs until nothing moves.

    Args:
        cluster: the ranks.
        rng: chooses who goes on.
    """

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster, self._rng = cluster, rng
        world = len(cluster.members["world"])
        self.at = dict.fromkeys(range(world), 0)
        self.started: dict[int, dict[str, int]] = {rank: {} for rank in range(world)}
        self.entries: dict[int, list[Entry]] = {rank: [] for rank in range(world)}
        self.marks: dict[int, list[MarkCount]] = {rank: [] for rank in range(world)}
        self.marked = dict.fromkeys(range(world), 0)
        self.open = dict.fromkeys(range(world), 0)  # the first collective that has not ended
        self.whats: dict[tuple[str, int], set[str]] = {}

    def ended(self, group: str, number: int) -> bool:
        """Return whether a collective has ended: all ranks have started it, with the same operation and sizes."""
        all_started = all(self.started[rank].get(group, 0) >= number for rank in self.cluster.members[group])
        return all_started and len(self.whats[group, number]) == 1

    def _all_ended(self, rank: int) -> bool:
        """Return whether all collectives that a rank has started have ended."""
        entries = self.entries[rank]
        while self.open[rank] < len(entries):
            entry = entries[self.open[rank]]
            if not self.ended(entry.group, entry.number):
                return False
            self.open[rank] += 1
        return True

    def run(self) -> None:
        """Let ranks go on, in a random order, until none can."""
        ranks = list(self.at)
        moved = True
        while moved:
            moved = False
            self._rng.shuffle(ranks)
            for rank in ranks:
                for _ in range(self._rng.randrange(1, 12)):
                    if not self._advance(rank):
                        break
                    moved = True

    def _advance(self, rank: int) -> bool:
        program = self.cluster.programs[rank]
        if self.at[rank] >= len(program):
            return False
        op = program[self.at[rank]]
        if (self.cluster.blocking or op.kind == "read") and not self._all_ended(rank):
            return False
        if op.kind == "stop":
            return False
        self.at[rank] += 1
        if op.kind == "mark":
            self.marked[rank] += 1
            counts = {name: self.started[rank].get(name, 0) for name in self._groups(rank)}
            self.marks[rank].append(MarkCount(self.marked[rank], op.step, op.what, counts))
        elif op.kind == "collective":
            number = self.started[rank].get(op.group, 0) + 1
            self.started[rank][op.group] = number
            self.entries[rank].append(Entry(op.group, number, op.what))
            self.whats.setdefault((op.group, number), set()).add(op.what)
        return True

    def _groups(self, rank: int) -> list[str]:
        return [name for name, ranks in self.cluster.members.items() if rank in ranks]

    def culprits(self, fault: Fault | None) -> tuple[int, ...]:
        """Return the ranks that started the hang: of two that stop, one may not get there."""
        if fault is None:
            return ()
        if fault.kind in STOPS:
            return tuple(rank for rank in fault.ranks if self.cluster.programs[rank][self.at[rank]].kind == "stop")
        return fault.ranks

    @property
    def finished(self) -> bool:
        """Whether all ranks have done their program, so that there is no hang."""
        return all(self.at[rank] >= len(self.cluster.programs[rank]) for rank in self.at)

    def release(self, rank: int) -> None:
        """Let a rank that is only slow go on, and all others for a moment."""
        self.at[rank] += 1
        ranks = list(self.at)
        for _ in range(3):
            self._rng.shuffle(ranks)
            for other in ranks:
                self._advance(other)

    def records(self, fault: Fault | None) -> dict[int, RankRecord | None]:
        """Return what the ranks publish; None for those that are stopped."""
        stopped = self.culprits(fault) if fault is not None and fault.kind == "stopped" else ()
        return {rank: None if rank in stopped else RankRecord(tuple(self.entries[rank][-KEPT:]), None,
                                                             tuple(self.marks[rank][-MARKS_KEPT:]))
                for rank in self.at}


TORN_SHARE = 0.1
"""Share of the slow ranks that go on while the records are read."""


def simulated(kind: str, rng: random.Random) -> tuple[Run, tuple[int, ...], dict[int, RankRecord | None]]:
    """Run a cluster of a random shape with a fault; return it, the culprits and what the ranks published.

    Args:
        kind: one of `FAULTS`; "" for none: all ranks do something long at the same place.
        rng: source of randomness.
    """
    tensor = rng.choice((1, 1, 2, 4, 8))
    data = rng.choice((2, 4, 8) if tensor > 1 else (3, 4, 8, 16))
    cluster = Cluster(tensor, data, blocking=rng.random() < 0.5, alike=rng.random() < 0.5)
    fault = inject(cluster, kind, rng) if kind else None
    if fault is None:
        step = rng.randrange(3, STEPS)
        for program in cluster.programs.values():
            at = next(index for index, op in enumerate(program) if op == Op("mark", "step", step=step))
            program.insert(at, Op("stop"))
    run = Run(cluster, rng)
    run.run()
    if run.finished:  # two exchanged collectives of one wait: nothing hangs
        return simulated(kind, rng)
    culprits = run.culprits(fault)
    records = run.records(fault)
    if kind == "slow" and rng.random() < TORN_SHARE:
        run.release(culprits[0])
        later = run.records(fault)
        records = {rank: later[rank] if rng.random() < 0.5 else record for rank, record in records.items()}
    return run, culprits, records
