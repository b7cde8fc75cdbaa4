"""Tests of finding silent workers: those that are lost, and not those that are late or unreachable with all others."""

from __future__ import annotations

from tidewheel.elastic.connection import RECONNECT_SECONDS
from tidewheel.elastic.generation import Generation, Worker
from tidewheel.elastic.silence import ALL_SILENT, Silence

LIMIT = 3.0


def workers(**beats: float) -> dict[str, Worker]:
    return {name: Worker(name, connected=True, beat=beat) for name, beat in beats.items()}


def look(silence: Silence, until: float, generation: Generation | None = None, since: float = 0.0) -> list[str]:
    """Look twice a second, as the coordinator does, and return the workers that the last look found."""
    results: list[Worker] = []
    for tick in range(int(since * 2), int(until * 2) + 1):
        results = silence.find(generation, tick / 2)
    return [worker.name for worker in results]


def test_a_worker_without_a_rank_is_lost_after_the_limit():
    known = workers(a=0.0, b=10.0)
    silence = Silence(known, LIMIT)
    assert look(silence, 2.5) == []
    assert look(silence, 3.0, since=3.0) == ["a"]


def test_a_worker_that_is_not_connected_is_not_looked_for():
    known = workers(a=0.0, b=10.0)
    known["a"].connected = False
    assert look(Silence(known, LIMIT), 9.0) == []


def test_a_member_of_a_generation_that_makes_progress_is_only_late():
    known = workers(a=0.0, b=10.0)
    generation = Generation(0, ("a", "b"), began=0.0, stepped_at=9.0)
    assert look(Silence(known, LIMIT), 10.0, generation) == []
    generation.stepped_at = 7.0
    assert look(Silence(known, LIMIT), 10.0, generation) == ["a"]


def test_while_all_are_silent_none_is_lost_for_much_longer():
    longest = max(ALL_SILENT * LIMIT, RECONNECT_SECONDS)
    silence = Silence(workers(a=0.0, b=0.5), LIMIT)
    assert look(silence, longest - 0.5) == []
    assert look(silence, longest, since=longest) == ["a"]


def test_time_in_which_the_coordinator_itself_stood_still_does_not_count():
    silence = Silence(workers(a=0.0, b=20.0), LIMIT)
    silence.find(None, 0.0)
    assert silence.find(None, 10.0) == []  # 10 s between two calls, of which one is allowed
    assert look(silence, 11.5, since=10.5) == []
    assert look(silence, 12.0, since=12.0) == ["a"]


def test_a_message_after_a_gap_without_any_restarts_the_limit_of_all():
    known = workers(a=0.0, b=0.0)
    silence = Silence(known, LIMIT)
    silence.heard(0.0)
    silence.heard(0.5)
    assert [worker.beat for worker in known.values()] == [0.0, 0.0]
    silence.heard(5.0)
    assert [worker.beat for worker in known.values()] == [5.0, 5.0]
