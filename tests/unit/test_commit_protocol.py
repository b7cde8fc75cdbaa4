"""Every interleaving of two drivers on one run: no stale commit counts, and no acknowledged commit is undone."""

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
"""A lost answer: the writer cannot know whether its request took effect."""
Objects = tuple[tuple[str, bytes], ...]


class AnswerLost(Exception):
    """A request whose outcome its writer does not know."""


def driver(name: str, commits: int, conditional: bool, tidy: bool) -> Generator[Any, Any, None]:
    """Take the run over, then commit one checkpoint after the other; yield ("acknowledged", name) for each."""
    calls = 0
    epoch = None
    while epoch is None:
        slot, _ = yield from protocol.newest()
        calls += 1
        try:
            record = yield from protocol.take_over(slot, _opening, f"{name}{calls}", conditional)
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
                committed, head = yield from protocol.commit(epoch, change, f"{name}{calls}", conditional)
            except AnswerLost:
                continue  # commit the same checkpoint again, as a retried save does
            except SlotsContested:
                return
            if not committed:
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
    """The store's objects, pending puts without a waiting sender, each writer's answers, and acknowledged commits."""

    objects: Objects = ()
    loose: tuple[Any, ...] = ()
    answers: tuple[tuple[Any, ...], ...] = ((), ())
    crashed: tuple[bool, ...] = (False, False)
    acknowledged: frozenset[str] = frozenset()
    faults: int = 0


@dataclass
class Explorer:
    """A search through all states that two drivers can reach."""

    commits: int
    conditional: bool
    faults: int
    """Largest number of crashes and lost answers together in one history."""
    tidy: bool = False
    max_states: int = 1_000_000
    seen: set[State] = field(default_factory=set)
    requests: dict[Any, Any] = field(default_factory=dict)
    """A driver's next request, by the driver and its answers so far; the driver is replayed for each entry."""

    def run(self) -> int:
        """Check the `max_states` states nearest to the start and return how many there were."""
        waiting = deque([State()])
        while waiting and len(self.seen) < self.max_states:
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
                crashed = tuple(dead or index == writer for index, dead in enumerate(state.crashed))
                # the writer dies with its request pending, which takes effect later or never
                violations.append(replace(faulty, crashed=crashed, loose=(*state.loose, request)))
                # the answer is lost, of a request that has taken effect and of one that still will
                violations.append(replace(self.answered(faulty, writer, LOST), objects=objects))
                violations.append(replace(self.answered(faulty, writer, LOST), loose=(*state.loose, request)))
        return violations

    def answered(self, state: State, writer: int, answer: Any) -> State:
        answers = list(state.answers)
        answers[writer] = (*answers[writer], answer)
        return replace(state, answers=tuple(answers))

    def next_request(self, writer: int, answers: tuple[Any, ...]) -> Any:
        """Return the driver's next request after `answers`, or None when it has ended."""
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
    """Return what a reader sees: slot and epoch of the newest record, and the valid checkpoints."""
    content = dict(objects)
    numbers = protocol.slot_numbers(list(content))
    if not numbers:
        return -1, -1, []
    head = json.loads(content[protocol.slot_name(numbers[-1])])
    return numbers[-1], head["epoch"], head["checkpoints"]


def check(before: State, after: State) -> None:
    old, new = reader(before.objects), reader(after.objects)
    assert new[1] >= old[1], f"stale: a record of epoch {new[1]} follows epoch {old[1]}"
    assert new[2][:len(old[2])] == old[2], f"undone: {old[2]} became {new[2]}"
    assert len(set(new[2])) == len(new[2]), f"twice: {new[2]}"
    assert after.acknowledged <= set(new[2]), f"acknowledged {set(after.acknowledged)}, a reader sees {new[2]}"


@pytest.mark.parametrize(("commits", "faults"), [(1, 0), (2, 0), pytest.param(1, 1, marks=pytest.mark.long)])
def test_two_drivers_keep_all_commits_where_creates_are_conditional(commits, faults):
    assert Explorer(commits, True, faults).run() > 500


@pytest.mark.parametrize("conditional", [True, False])
def test_random_histories_with_crashes_and_lost_answers_are_sound(conditional):
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


def test_a_driver_that_slept_while_slots_were_deleted_commits_nothing_stale(monkeypatch):
    monkeypatch.setattr(protocol, "KEPT_SLOTS", 1)
    assert Explorer(2, True, 0, tidy=True, max_states=15_000).run() == 15_000


def test_two_drivers_keep_all_commits_where_creates_overwrite():
    """All states would take an hour: check the first 15,000; the random histories above cover the others."""
    assert Explorer(1, False, 0, max_states=15_000).run() == 15_000


def test_the_explorer_detects_that_plain_creates_are_unsafe(monkeypatch):
    """On a store that overwrites, the protocol for conditional creates fails; the explorer must detect it."""
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
