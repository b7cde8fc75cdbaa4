"""When a driver takes over a run: at once, after the lease, on request, or not at all."""

from __future__ import annotations

import time

import pytest

from tidewheel.commit_log import CommitLog
from tidewheel.errors import OwnershipError, StorageAwayError
from tidewheel.lease import Holder
from tidewheel.ownership import Renewal, Timing, acquire, owning
from tidewheel.storage import LocalStore, Store, store

TIMES = Timing(beat=10.0, lease=45.0)


class Clock:
    """A clock that advances only by sleeping and runs `events` at their times."""

    def __init__(self, **events) -> None:
        self.now = 0.0
        self.events = events

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for name, (at, action) in list(self.events.items()):
            if self.now >= at:
                del self.events[name]
                action()


@pytest.fixture
def run(tmp_path) -> Store:
    return store(tmp_path / "run")


def owned_remotely(run: Store):
    """Let a driver on another machine own the run."""
    log = CommitLog(run.child("checkpoints"))
    return log, log.take_over(Holder("one", "another-machine", 1, "1"), None)


def take(run: Store, clock: Clock, **options):
    return acquire(run, times=TIMES, sleep=clock.sleep, clock=clock, **options)


def test_a_new_run_starts_with_epoch_0_and_counts_its_owners(run):
    for epoch in range(3):
        with owning(run) as record:
            assert record.epoch == epoch


def test_a_run_of_an_older_version_keeps_its_checkpoints(run):
    run.write_json("run.json", {})
    record = acquire(run, committed=lambda: ["step_00000010", "step_00000020"])
    assert (record.epoch, record.checkpoints) == (1, ("step_00000010", "step_00000020"))


def test_an_owner_without_heartbeats_is_replaced_after_its_lease(run):
    owned_remotely(run)
    clock = Clock()
    messages = []
    assert take(run, clock, say=messages.append).epoch == 1
    assert TIMES.lease <= clock.now <= TIMES.lease + TIMES.beat
    assert len(messages) == 1
    assert "process 1 on another-machine" in messages[0]


@pytest.mark.parametrize("sign", ["beat", "commit"])
def test_an_owner_with_heartbeats_is_not_replaced(run, sign):
    log, record = owned_remotely(run)
    actions = {"beat": lambda: log.beat(record.epoch, 1), "commit": lambda: log.commit("step_00000001", 0)}
    clock = Clock(alive=(30.0, actions[sign]))
    with pytest.raises(OwnershipError, match=r"being trained by process 1 on another-machine since .* \(epoch 0"):
        take(run, clock)
    assert clock.now < TIMES.lease
    assert log.head().epoch == 0


def test_an_owner_that_gives_the_run_back_meanwhile_is_followed_at_once(run):
    log, record = owned_remotely(run)
    clock = Clock(end=(10.0, lambda: log.release(record.epoch)))
    assert take(run, clock).epoch == 1
    assert clock.now < 20.0


def test_force_takes_over_without_waiting(run):
    owned_remotely(run)
    clock = Clock()
    assert take(run, clock, force=True).epoch == 1
    assert clock.now == 0.0


def test_the_second_driver_at_an_expired_lease_is_refused(run):
    log, _ = owned_remotely(run)
    winner = Holder("two", "third-machine", 1, "1")
    clock = Clock(third=(40.0, lambda: log.take_over(winner, log.head())),
                  alive=(44.0, lambda: log.beat(1, 1)), again=(60.0, lambda: log.beat(1, 2)))
    with pytest.raises(OwnershipError, match="third-machine"):
        take(run, clock)


def test_a_renewal_notices_that_the_run_was_taken_over(run):
    times = Timing(0.05, 0.2)
    lost = []
    record = acquire(run)
    renewal = Renewal(run, record.epoch, lost.append, times=times)
    try:
        assert acquire(run, force=True).epoch == 1
        until = time.monotonic() + 120
        while not lost:
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        renewal.close()
    assert "taken over" in lost[0].what
    assert renewal.lost is lost[0]


def test_a_renewal_outlasts_an_unavailable_store(run, monkeypatch):
    lost = []
    record = acquire(run)
    away = [True]
    listed = LocalStore.list

    def list_(self, prefix=""):
        if away[0]:
            raise StorageAwayError("it is away", where=self.uri)
        return listed(self, prefix)

    monkeypatch.setattr(LocalStore, "list", list_)
    log = CommitLog(run.child("checkpoints"))
    renewal = Renewal(run, record.epoch, lost.append, times=Timing(0.02, 0.2))
    try:
        until = time.monotonic() + 120
        while log.last_beat(record.epoch)[0] < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        away[0] = False
        assert not lost
    finally:
        renewal.close()
