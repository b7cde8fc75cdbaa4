"""The scheduler with steps that are plain functions: order, side by side, failures, kills, cancels, two drivers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tidewheel.errors import ConfigError
from tidewheel.storage import store
from tidewheel.workflow.graph import Node
from tidewheel.workflow.lease import Holder, Leases
from tidewheel.workflow.records import Records
from tidewheel.workflow.schedule import Cancelled, Schedule, StepsFailed, cancel_key, grant


def node(name: str, *needs: str, kind: str = "function", least: int = 1, most: int = 1) -> Node:
    entry = {"name": name, "kind": kind, "config": {"elastic": {"min_workers": least, "max_workers": most}}}
    return Node(name, kind, entry, {}, {}, {need: need for need in needs}, f"key{name}", f"/nowhere/{name}")


class Steps:
    """A launcher that writes down what happens; `work` does what a step does."""

    def __init__(self, work: Any = None, places: int | None = None) -> None:
        self.work, self.free, self.interrupted = work or (lambda node: None), places, threading.Event()
        self.begun: list[str] = []
        self.shares: dict[str, int | None] = {}
        self.together = 0
        self._now = 0
        self._lock = threading.Lock()

    def launch(self, node: Node, max_workers: int | None) -> dict[str, Any]:
        with self._lock:
            self.begun.append(node.name)
            self.shares[node.name] = max_workers
            self._now += 1
            self.together = max(self.together, self._now)
        try:
            self.work(node)
        finally:
            with self._lock:
                self._now -= 1
        return {"hash": f"hash of {node.name}"}

    def interrupt(self, running: Any) -> None:
        self.interrupted.set()

    def places(self, node: Node) -> int | None:
        return self.free


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("tidewheel.workflow.schedule.POLL_SECONDS", 0.01)
    monkeypatch.setattr("tidewheel.workflow.schedule.FOREIGN_SECONDS", 0.05)
    monkeypatch.setattr("tidewheel.workflow.records.KINDS", {kind: Intact() for kind in ("function", "train")})


class Intact:
    def intact(self, place: str, artifact: Any) -> bool:
        return True


def schedule(tmp_path, nodes: list[Node], steps: Steps, **more: Any) -> Schedule:
    records = Records(str(tmp_path))
    leases = Leases(store(tmp_path).child("leases"), Holder.me())
    return Schedule(nodes, records, leases, steps, say=lambda text: None, beat_seconds=0.05, **more)


DIAMOND = [node("a"), node("b", "a"), node("c", "a"), node("d", "b", "c")]


def test_inputs_first_and_independent_steps_side_by_side(tmp_path):
    meet = threading.Barrier(2, timeout=10)
    steps = Steps(lambda node: meet.wait() if node.name in "bc" else None)
    done = schedule(tmp_path, DIAMOND, steps).run()
    assert steps.begun[0] == "a"
    assert steps.begun[3] == "d"
    assert steps.together == 2
    assert {name: record.inputs for name, record in done.items()}["d"] == {"b": "keyb", "c": "keyc"}
    again = Steps()
    assert schedule(tmp_path, DIAMOND, again).run().keys() == done.keys()
    assert again.begun == []  # a second run does nothing


def test_a_failure_names_the_step_its_log_and_how_to_go_on(tmp_path):
    def work(node: Node) -> None:
        if node.name == "b":
            raise ConfigError("no such thing", where="there", mend="do this")

    steps = Steps(work)
    with pytest.raises(StepsFailed) as failed:
        schedule(tmp_path, DIAMOND, steps).run()
    text = str(failed.value)
    assert "step b failed: there: no such thing" in text
    assert "do this" in text
    assert "logs/b-keyb.jsonl" in text
    assert "not run, because they read it: d" in text
    assert "run the workflow again" in text
    assert sorted(steps.begun) == ["a", "b", "c"]
    assert Records(str(tmp_path)).attempt(DIAMOND[1])["state"] == "failed"
    mended = Steps()
    schedule(tmp_path, DIAMOND, mended).run()
    assert mended.begun == ["b", "d"]


def test_a_fault_of_ours_keeps_its_trace(tmp_path):
    def work(node: Node) -> None:
        raise ZeroDivisionError("oops")

    with pytest.raises(StepsFailed) as failed:
        schedule(tmp_path, [node("a")], Steps(work)).run()
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_cancelled_from_outside(tmp_path):
    steps = Steps()
    steps.work = lambda node: steps.interrupted.wait(10)
    running = schedule(tmp_path, [node("a"), node("b", "a")], steps)
    store(tmp_path).write_json(cancel_key(running._leases.holder.driver), {})
    with pytest.raises(Cancelled, match="stopped"):
        running.run()
    assert steps.interrupted.is_set()
    assert Records(str(tmp_path)).attempt(node("a"))["state"] == "stopped"
    assert Leases(store(tmp_path).child("leases"), Holder.me()).acquire("a-keya")  # given back


def test_two_drivers_run_each_step_once(tmp_path):
    nodes = [node(f"s{number}") for number in range(6)] + [node("end", *(f"s{number}" for number in range(6)))]
    both = [Steps(lambda node: time.sleep(0.1)) for _ in range(2)]
    results: list[Any] = []
    threads = [threading.Thread(target=lambda steps=steps: results.append(schedule(tmp_path, nodes, steps).run()))
               for steps in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 2
    assert results[0].keys() == results[1].keys() == {each.name for each in nodes}
    assert sorted(both[0].begun + both[1].begun) == sorted(each.name for each in nodes)


def test_trainings_share_the_cluster_and_wait_for_their_least(tmp_path):
    trainings = [node(name, kind="train", least=2, most=8) for name in "abc"]
    steps = Steps(lambda node: time.sleep(0.2), places=5)
    schedule(tmp_path, trainings, steps).run()
    assert steps.together == 2
    assert sorted(share for share in steps.shares.values() if share is not None)[-1] <= 5
    alone = Steps(places=5)
    schedule(tmp_path / "alone", trainings[:1], alone).run()
    assert alone.shares == {"a": None}  # it may also grow into what joins later


@pytest.mark.parametrize(("places", "wanted", "taken", "waiting", "share"), [
    (8, (1, 8), 0, [], 8), (8, (1, 8), 0, [1], 7), (8, (2, 8), 0, [2, 2], 4), (8, (1, 2), 0, [1], 2),
    (8, (4, 8), 6, [], 0), (8, (2, 8), 6, [2], 2), (1, (2, 4), 0, [], 2), (8, (4, 8), 0, [8], 8)])
def test_shares(places, wanted, taken, waiting, share):
    assert grant(places, wanted, taken, waiting) == share
