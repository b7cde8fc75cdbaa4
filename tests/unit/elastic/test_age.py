"""A start reads no more of an old run than of a young one."""

import pytest

from tests.aged_run import AgedRun, start
from tidewheel.elastic.coordinator import Coordinator

MOST_REQUESTS = 20


@pytest.mark.parametrize("days", [0.1, 10, 30])
def test_a_start_makes_few_requests_however_old_the_run_is(days: float):
    with AgedRun(days, latency=0.0) as run:
        assert start(run.uri, run.steps - 30) == (run.steps, run.generations - 1, run.generations - 1)
        assert run.requests <= MOST_REQUESTS


def test_without_a_state_file_the_newest_records_are_used():
    with AgedRun(30, latency=0.0, state=False) as run:
        step, failures, generation = start(run.uri, run.steps - 30)
        assert (step, generation) == (run.steps, run.generations - 1)
        assert failures > 0
        assert run.requests <= 2 * MOST_REQUESTS


def test_only_the_newest_records_of_a_run_of_an_older_version_are_read():
    with AgedRun(0.5, latency=0.0, parts=True, state=False) as run:
        assert len(run.objects) > 17_000
        past = Coordinator(run.uri).past()
        assert (past.step, past.generation) == (run.steps, run.generations - 1)
        assert run.requests < 1_500  # one part for every five of the newest 1,000 steps, the events, the listings
