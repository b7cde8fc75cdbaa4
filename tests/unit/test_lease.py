"""A lease never has two holders, on any store, and no holder keeps it for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from tidewheel.conditional_create import creates_are_conditional
from tidewheel.errors import OwnershipError
from tidewheel.lease import Holder, Leases, holding
from tidewheel.storage import LocalStore, store


class Clock:
    """A clock that advances only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Careless(LocalStore):
    """A store that ignores If-None-Match, as some S3 servers do."""

    def create(self, key: str, data: bytes) -> bool:
        self.write(key, data)
        return True


def remote_holder(index: int) -> Holder:
    return Holder(f"driver{index}", "another-machine", 1, "1")


@pytest.fixture(params=[LocalStore, Careless])
def folder(request, tmp_path):
    return request.param(tmp_path)


def leases(folder, index: int, clock: Clock) -> Leases:
    return Leases(folder, remote_holder(index), ttl_seconds=20, settle_seconds=2, sleep=clock.sleep, clock=clock)


def test_one_holder_until_it_is_released(folder):
    clock = Clock()
    one = leases(folder, 1, clock)
    two = leases(folder, 2, clock)
    assert one.acquire("step")
    assert not two.acquire("step")
    assert two.look("step")["driver"] == "driver1"
    one.release("step")
    assert two.look("step") is None
    assert two.acquire("step")
    assert not one.acquire("step")
    assert one.beat() == []  # a released lease is not lost


def test_a_silent_holder_loses_the_lease_and_notices(folder):
    clock = Clock()
    one = leases(folder, 1, clock)
    two = leases(folder, 2, clock)
    assert one.acquire("step")
    for _ in range(5):
        assert not two.acquire("step")
        clock.now += 10
        assert one.beat() == []
    assert not two.acquire("step")
    clock.now += 21
    assert two.acquire("step")
    assert one.beat() == ["step"]
    assert two.beat() == []


def test_the_death_of_a_process_on_this_machine_is_noticed_at_once(tmp_path):
    code = ("import sys; from tidewheel.lease import *; from tidewheel.storage import store\n"
            "assert Leases(store(sys.argv[1]), Holder.me()).acquire('step'); print('held', flush=True); input()")
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert holder.stdout.readline() == b"held\n"
    leases = Leases(store(tmp_path), Holder.me())
    assert not leases.acquire("step")
    holder.kill()
    assert holder.wait() != 0
    assert leases.look("step") is None
    assert leases.acquire("step")
    holder.stdin.close()
    holder.stdout.close()


@pytest.mark.parametrize("kind", [LocalStore, Careless])
def test_of_many_candidates_one_gets_the_lease(kind, tmp_path):
    """Threads with real clocks compete for each lease."""
    for round_ in range(4):
        winners = []
        gate = threading.Barrier(6)

        def race(index: int, winners=winners, gate=gate, name=f"step{round_}") -> None:
            leases = Leases(kind(tmp_path), remote_holder(index), settle_seconds=0.4)
            creates_are_conditional(leases._store)
            gate.wait()
            if leases.acquire(name):
                winners.append(index)

        threads = [threading.Thread(target=race, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) <= 1
        assert winners or kind is Careless  # without atomic creation all may withdraw, and try again later


def test_a_slow_claim_is_taken_back(tmp_path):
    """Writing the claim took longer than a winner waits, so another one may have won meanwhile."""
    clock = Clock()
    folder = Careless(tmp_path)
    slow = leases(folder, 1, clock)
    assert not creates_are_conditional(folder)
    write = folder.write

    def late(key, data):
        clock.now += 1.5
        return write(key, data)

    folder.write = late
    assert not slow.acquire("step")
    assert folder.list("step") == []


def test_an_object_is_created_once(tmp_path):
    folder = LocalStore(tmp_path)
    assert folder.create("a/b", b"1")
    assert not folder.create("a/b", b"2")
    assert folder.read("a/b") == b"1"
    assert [entry.key for entry in folder.list()] == ["a/b"]


def test_a_beat_does_not_take_back_a_released_lease(folder):
    """A lease that is released during a beat stays free."""
    one = leases(folder, 1, Clock())
    two = leases(folder, 2, Clock())
    assert one.acquire("step")
    write = one._write
    releasing = threading.Thread(target=one.release, args=("step",))

    def meanwhile(key: str, *, released: bool = False) -> None:
        if not released:
            releasing.start()
            releasing.join(0.2)
        write(key, released=released)

    one._write = meanwhile
    one.beat()
    releasing.join()
    assert two.acquire("step")


def test_a_lease_is_held_for_a_block_and_errors_name_its_holder(tmp_path):
    folder = store(tmp_path)
    with holding(folder, "task", "somebody is at it", beat_seconds=0.05):
        with pytest.raises(OwnershipError, match=rf"somebody is at it: process {os.getpid()} on"):
            with holding(folder, "task", "somebody is at it", beat_seconds=0.2):
                pass
    messages: list[str] = []
    with holding(folder, "task", "somebody is at it", say=messages.append):
        assert Leases(folder, remote_holder(1)).look("task")["pid"] == os.getpid()
    assert messages == []
    assert Leases(folder, remote_holder(1)).look("task") is None


def test_an_expired_lease_is_lost(tmp_path):
    folder = store(tmp_path)
    silent = Leases(folder, remote_holder(1))
    assert silent.acquire("task")
    with holding(folder, "task", "somebody is at it", ttl_seconds=0.3, beat_seconds=0.05) as held:
        assert silent.beat() == ["task"]
        assert not held.lost
        successor = Leases(folder, remote_holder(2), ttl_seconds=-1.0)
        assert successor.acquire("task"), "with a negative lifetime any other lease has expired"
        until = time.monotonic() + 120
        while not held.lost:
            assert time.monotonic() < until
            time.sleep(0.01)
