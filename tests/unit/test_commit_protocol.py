"""Every interleaving of two drivers on one run: never a stale commit, never an acknowledged one undone."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tidewheel import commit_protocol as protocol
from tidewheel.commit_protocol import Create, Delete, Get, List, Pause, Put, SlotsContested

LOST = "lost"
"""The answer of a request did not arrive: the writer cannot know whether it took effect."""
Objects = tuple[tuple[str, bytes], ...]


class AnswerLost(Exception):
    """A writer's request failed in an unknown way."""


def driver(name: str, commits: int, conditional: bool, tidy: bool) -> Generator[Any, Any, None]:
    """Take the run over, then commit one checkpoint after the other; ("acknowledged", name) is yielded for each."""
    calls = 0
    epoch = None
    while epoch is None:
        number, _ = yield from protocol.newest()
        calls += 1
        try:
            record = yield from protocol.take_over(number, _opening, f"{name}{calls}", conditional)
        except (AnswerLost, SlotsContested):
            record = None
        if calls > 2:
            return
        epoch = None if record is None else record["epoch"]
    for step in range(commits):
        checkpoint = f"step{step}-e{epoch}"

        def change(head: dict[str, Any], checkpoint: str = checkpoint) -> dict[str, Any] | None:
            if checkpoint in head["checkpoints"]:
                return None
            return {**head, "checkpoints": [*head["checkpoints"], checkpoint]}

        for _ in range(2):
            calls += 1
            try:
                kept, head = yield from protocol.commit(epoch, change, f"{name}{calls}", conditional)
            except AnswerLost:
                continue  # the same checkpoint again, as a save that is tried again does
            except SlotsContested:
                return
            if not kept:
                return
            yield ("acknowledged", checkpoint)
            if tidy:
                yield from protocol.tidy(head["number"])
            break
        else:
            return


def _opening(epoch: int, head: dict[str, Any] | None) -> dict[str, Any]:
    return {"epoch": epoch, "checkpoints": [] if head is None else head["checkpoints"]}


@dataclass(frozen=True)
class State:
    """Store, puts under way of which no sender waits any more, each writer's answers so far, what was acknowledged."""

    objects: Objects = ()
    loose: tuple[Any, ...] = ()
    answers: tuple[tuple[Any, ...], ...] = ((), ())
    crashed: tuple[bool, ...] = (False, False)
    acknowledged: frozenset[str] = frozenset()
    faults: int = 0


@dataclass
class Explorer:
    """Walks through all states that two drivers can reach."""

    commits: int
    conditional: bool
    faults: int
    """Crashes and lost answers, together, in one history."""
    tidy: bool = False
    most: int = 1_000_000
    seen: set[State] = field(default_factory=set)
    requests: dict[Any, Any] = field(default_factory=dict)
    """What a driver asks next, by the driver and the answers it was given; a driver is replayed for each."""

    def run(self) -> int:
        """The number of states, all of them sound; at most `most`, those nearest to the beginning."""
        waiting = deque([State()])
        while waiting and len(self.seen) < self.most:
            state = waiting.popleft()
            if state in self.seen:
                continue
            self.seen.add(state)
            for after in self.successors(state):
                check(state, after)
                waiting.append(after)
        return len(self.seen)

    def successors(self, state: State) -> list[State]:
        violations = []
        for index, request in enumerate(state.loose):
            rest = state.loose[:index] + state.loose[index + 1:]
            objects, _ = self.carry_out(state.objects, request)
            violations.append(replace(state, objects=objects, loose=rest))
        for writer in (0, 1):
            if state.crashed[writer]:
                continue
            key = (writer, state.answers[writer])
            if key not in self.requests:
                self.requests[key] = self.next_request(*key)
            request = self.requests[key]
            if request is None:
                continue
            if isinstance(request, tuple):
                violations.append(replace(self.answered(state, writer, None),
                                     acknowledged=state.acknowledged | {request[1]}))
                continue
            objects, answer = self.carry_out(state.objects, request)
            violations.append(replace(self.answered(state, writer, answer), objects=objects))
            if state.faults < self.faults and isinstance(request, Create | Put):
                faulty = replace(state, faults=state.faults + 1)
                crashed = tuple(dead or number == writer for number, dead in enumerate(state.crashed))
                # it dies with the request under way, which lands later or never
                violations.append(replace(faulty, crashed=crashed, loose=(*state.loose, request)))
                # the answer is lost: of a request that took effect, and of one that still will
                violations.append(replace(self.answered(faulty, writer, LOST), objects=objects))
                violations.append(replace(self.answered(faulty, writer, LOST), loose=(*state.loose, request)))
        return violations

    def answered(self, state: State, writer: int, answer: Any) -> State:
        answers = list(state.answers)
        answers[writer] = (*answers[writer], answer)
        return replace(state, answers=tuple(answers))

    def next_request(self, writer: int, answers: tuple[Any, ...]) -> Any:
        """What the driver asks next, having been given `answers`; None when it has ended."""
        steps = driver("AB"[writer], self.commits, self.conditional, self.tidy)
        try:
            request = next(steps)
            for answer in answers:
                request = steps.throw(AnswerLost()) if answer == LOST else steps.send(
                    list(answer) if isinstance(answer, tuple) else answer)
        except StopIteration:
            return None
        return request

    def carry_out(self, objects: Objects, request: Any) -> tuple[Objects, Any]:
        content = dict(objects)
        answer: Any = None
        match request:
            case List():
                return objects, tuple(sorted(content))
            case Get(name):
                return objects, content.get(name)
            case Pause():
                return objects, None
            case Create(name, data):
                answer = name not in content or not self.conditional
                if answer:
                    content[name] = data
            case Put(name, data):
                content[name] = data
            case Delete(name):
                content.pop(name, None)
        return tuple(sorted(content.items())), answer


def reader(objects: Objects) -> tuple[int, int, list[str]]:
    """What a reader takes: slot and epoch of the newest record, and the checkpoints that count."""
    content = dict(objects)
    numbers = protocol.slot_numbers(list(content))
    if not numbers:
        return -1, -1, []
    head = json.loads(content[protocol.slot_name(numbers[-1])])
    return numbers[-1], head["epoch"], head["checkpoints"]


def check(before: State, after: State) -> None:
    old, new = reader(before.objects), reader(after.objects)
    assert new[1] >= old[1], f"stale: a record of epoch {new[1]} came behind epoch {old[1]}"
    assert new[2][:len(old[2])] == old[2], f"undone: {old[2]} became {new[2]}"
    assert len(set(new[2])) == len(new[2]), f"twice: {new[2]}"
    assert after.acknowledged <= set(new[2]), f"acknowledged {set(after.acknowledged)}, a reader takes {new[2]}"


@pytest.mark.parametrize(("commits", "faults"), [(1, 0), (2, 0), pytest.param(1, 1, marks=pytest.mark.long)])
def test_two_drivers_where_creates_are_conditional(commits, faults):
    assert Explorer(commits, True, faults).run() > 500


@pytest.mark.parametrize("conditional", [True, False])
def test_random_histories_with_crashes_and_lost_answers(conditional):
    choose = random.Random(7)
    acknowledged = 0
    for _ in range(400):
        explorer = Explorer(2, conditional, faults=3, tidy=True)
        state = State()
        while successors := explorer.successors(state):
            after = choose.choice(successors)
            check(state, after)
            state = after
        acknowledged += len(state.acknowledged)
    assert acknowledged > 100


def test_a_driver_that_slept_while_slots_were_deleted(monkeypatch):
    monkeypatch.setattr(protocol, "KEPT_SLOTS", 1)
    assert Explorer(2, True, 0, tidy=True, most=15_000).run() == 15_000


def test_two_drivers_where_creates_overwrite():
    """All states there are would take an hour: the first 15,000, and the random histories above."""
    assert Explorer(1, False, 0, most=15_000).run() == 15_000


def test_the_explorer_finds_what_is_wrong_with_plain_creates(monkeypatch):
    """The protocol for conditional creates, on a store that overwrites, is broken; the explorer must see it."""
    careless = Explorer(1, True, 0)
    monkeypatch.setattr(Explorer, "carry_out", lambda self, objects, request: _overwriting(objects, request))
    with pytest.raises(AssertionError, match=r"undone|stale|acknowledged"):
        careless.run()


def _overwriting(objects: Objects, request: Any) -> tuple[Objects, Any]:
    content = dict(objects)
    match request:
        case List():
            return objects, tuple(sorted(content))
        case Get(name):
            return objects, content.get(name)
        case Create(name, data) | Put(name, data):
            content[name] = data
    return tuple(sorted(content.items())), True
