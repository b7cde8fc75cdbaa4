"""A driver starts its own actors again if they die, but not for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError

from tidewheel.elastic import lost_actors
from tidewheel.elastic.lost_actors import (
    MISSED_PINGS,
    MOST_LOSSES,
    WITHIN_SECONDS,
    LostActorError,
    ending_frozen,
    lost,
    outliving,
)
from tidewheel.errors import ClusterError


class Clock:
    """A clock that each call advances by a step."""

    def __init__(self, step: float) -> None:
        self._step = step
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._step
        return self._now


def failing(times: int, seen: list[LostActorError | None]):
    def attempt(before: LostActorError | None) -> str:
        seen.append(before)
        if len(seen) <= times:
            raise lost(RuntimeError(f"died {len(seen)}\nsecond line"))
        return "trained"

    return attempt


def test_an_attempt_knows_the_loss_before_it():
    seen: list[LostActorError | None] = []
    assert outliving(failing(2, seen), Clock(1.0)) == "trained"
    assert seen[0] is None
    assert ["died 1" in str(seen[1]), "died 2" in str(seen[2])] == [True, True]
    assert "died 1 second line" in str(seen[1]).splitlines()[0]


def test_an_error_without_a_text_is_named():
    assert "RuntimeError" in str(lost(RuntimeError()))


def test_many_losses_in_a_short_time_end_the_run():
    seen: list[LostActorError | None] = []
    with pytest.raises(LostActorError, match=f"died {MOST_LOSSES + 1}"):
        outliving(failing(100, seen), Clock(1.0))
    assert len(seen) == MOST_LOSSES + 1


def test_rare_losses_never_end_it():
    seen: list[LostActorError | None] = []
    assert outliving(failing(5 * MOST_LOSSES, seen), Clock(WITHIN_SECONDS)) == "trained"


def test_other_errors_are_raised_at_once():
    def attempt(before: LostActorError | None) -> str:
        raise ClusterError("too few CPUs", where="elastic.min_workers", fix="add nodes")

    with pytest.raises(ClusterError, match="too few CPUs"):
        outliving(attempt)


class Pinged:
    """A coordinator that answers pings as a test says, and is over after the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Iterable[str]) -> None:
        self.endpoint = SimpleNamespace(remote=lambda: "endpoint")
        self.lost = SimpleNamespace(remote=lambda: "lost")
        self.calls: list[str] = []
        self.killed: list[Any] = []
        self.over = threading.Event()
        self._answers = iter(answers)
        monkeypatch.setattr(lost_actors, "PAUSE_SECONDS", 0.001)
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(ray, "kill", self._kill)

    def _get(self, call: str, timeout: float) -> None:
        self.calls.append(call)
        match next(self._answers, "over"):
            case "late":
                raise GetTimeoutError
            case "over":
                self.over.set()
                raise ActorDiedError

    def _kill(self, actor: Any) -> None:
        self.killed.append(actor)
        self.over.set()

    def watch(self) -> None:
        """Watch it until it is over, or killed."""
        with ending_frozen(self):
            assert self.over.wait(60)


def test_a_coordinator_that_misses_pings_in_a_row_is_ended(monkeypatch):
    coordinator = Pinged(monkeypatch, ["yes", *["late"] * MISSED_PINGS])
    coordinator.watch()
    assert coordinator.killed == [coordinator]
    assert coordinator.calls == ["endpoint", *["lost"] * MISSED_PINGS]


def test_a_coordinator_that_answers_now_and_then_is_not_ended(monkeypatch):
    coordinator = Pinged(monkeypatch, ["yes", *[*["late"] * (MISSED_PINGS - 1), "yes"] * 3])
    coordinator.watch()
    assert coordinator.killed == []


def test_a_coordinator_that_starts_is_given_time(monkeypatch):
    coordinator = Pinged(monkeypatch, [*["late"] * 5 * MISSED_PINGS, "yes"])
    coordinator.watch()
    assert coordinator.killed == []
    assert coordinator.calls == [*["endpoint"] * (5 * MISSED_PINGS + 1), "lost"]
