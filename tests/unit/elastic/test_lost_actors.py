"""A driver starts its own actors again if they die, but not for ever."""

from __future__ import annotations

import pytest

from tidewheel.elastic.lost_actors import MOST_LOSSES, WITHIN_SECONDS, LostActorError, lost, outliving
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
