"""Tests of the work of an exchange beside the training."""

from threading import Event

import pytest

from tidewheel.errors import StorageAwayError
from tidewheel.outer.background import Background
from tidewheel.time_limit import TimeLimit


def test_an_error_is_raised_by_the_call_that_waits():
    background = Background(TimeLimit())

    def fail() -> None:
        raise ValueError("it went wrong")

    background.start(fail)
    with pytest.raises(ValueError, match="it went wrong"):
        background.join()
    background.join()


@pytest.mark.timeout(30)
def test_nobody_waits_for_storage_that_hangs_when_the_generation_has_ended():
    limit = TimeLimit()
    answers = Event()
    background = Background(limit)

    def hang() -> None:
        answers.wait()

    background.start(hang)
    limit.end("its workers have parted")
    with pytest.raises(StorageAwayError, match="its workers have parted"):
        background.join()
    answers.set()
