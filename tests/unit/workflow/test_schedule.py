"""The scheduler with steps that are plain functions: order, side by side, failures, kills, cancels, two drivers."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from tidewheel.errors import ConfigError
from tidewheel.lease import Holder, Leases
from tidewheel.storage import store
from tidewheel.workflow.graph import Node
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

    def places(self, node: Node, *, spare_cpus: float = 0) -> int | None:
        return None if self.free is None else self.free - int(spare_cpus)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("tidewheel.workflow.schedule.POLL_SECONDS", 0.01)
    monkeypatch.setattr("tidewheel.workflow.schedule.FOREIGN_SECONDS", 0.05)
    monkeypatch.setattr("tidewheel.workflow.records.KINDS", {kind: Intact() for kind in ("function", "train",
                                                                                            "pipeline")})
    monkeypatch.setattr("tidewheel.workflow.schedule.KINDS", {"pipeline": BEGUN})


class Begun:
    """A kind of pipelines that have published their first wave when `wave` is set."""

    def __init__(self) -> None:
        self.wave = threading.Event()

    def has_wave(self, place: str) -> bool:
        return self.wave.is_set()


BEGUN = Begun()


class Intact:
    def intact(self, place: str, artifact: Any) -> bool:
        return True


def schedule(tmp_path, nodes: list[Node], steps: Steps, **more: Any) -> Schedule:
    records = Records(str(tmp_path))
    leases = Leases(store(tmp_path).child("leases"), Holder.me())
    return Schedule(nodes, records, leases, steps, say=lambda text: None, beat_seconds=0.05, **more)


DIAMOND = [node("a"), node("b", "a"), node("c", "a"), node("d", "b", "c")]


def test_inputs_first_and_independent_steps_side_by_side(tmp_path):
    meet = threading.Barrier(2, timeout=60)
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
            raise ConfigError("no such thing", where="there", fix="do this")

    steps = Steps(work)
    with pytest.raises(StepsFailed) as failed:
        schedule(tmp_path, DIAMOND, steps).run()
    text = str(failed.value)
    assert "step b failed: there: no such thing" in text
    assert "do this" in text
    assert "logs/b-keyb.jsonl" in text
    assert "not run, because they read a failed step: d" in text
    assert "run the workflow again" in text
    assert sorted(steps.begun) == ["a", "b", "c"]
    assert Records(str(tmp_path)).attempt(DIAMOND[1])["state"] == "failed"
    fixed = Steps()
    schedule(tmp_path, DIAMOND, fixed).run()
    assert fixed.begun == ["b", "d"]


def test_a_fault_of_ours_keeps_its_trace(tmp_path):
    def work(node: Node) -> None:
        raise ZeroDivisionError("oops")

    with pytest.raises(StepsFailed) as failed:
        schedule(tmp_path, [node("a")], Steps(work)).run()
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_cancelled_from_outside(tmp_path):
    steps = Steps()
    steps.work = lambda node: steps.interrupted.wait(60)
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
        thread.join(120)
    assert len(results) == 2
    assert results[0].keys() == results[1].keys() == {item.name for item in nodes}
    assert sorted(both[0].begun + both[1].begun) == sorted(item.name for item in nodes)


def test_trainings_share_the_cluster_and_wait_for_their_least(tmp_path):
    trainings = [node(name, kind="train", least=2, most=8) for name in "abc"]
    two = threading.Event()

    def work(_: Node) -> None:
        if steps.together == 2:
            two.set()
        assert two.wait(120), "the first training ran alone"

    steps = Steps(work, places=5)
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


def overlapping(**sizes: int) -> list[Node]:
    """A pipeline and a training that reads its waves."""
    training = node("training", kind="train", **sizes)
    entry = {**training.entry, "overlap": True}
    return [node("web", kind="pipeline"), replace(training, entry=entry, needs={"data": "web"})]


def test_a_training_overlaps_its_pipeline_and_is_published_after_it(tmp_path):
    BEGUN.wave.clear()
    started, records = threading.Event(), Records(str(tmp_path))
    nodes = overlapping(most=4)

    def work(node: Node) -> None:
        if node.name == "web":
            assert not started.wait(0.3)
            BEGUN.wave.set()
            assert started.wait(60)
            time.sleep(0.1)
            assert records.published(nodes[1]) is None  # though it has ended
        else:
            started.set()

    steps = Steps(work, places=3)
    done = schedule(tmp_path, nodes, steps).run()
    assert steps.begun == ["web", "training"]
    assert steps.shares["training"] == 2  # a place is left for the pipeline
    assert done["training"].inputs == {"data": "keyweb"}
    assert done["training"].finished >= done["web"].finished


def test_without_room_for_both_the_training_waits_for_the_pipeline(tmp_path):
    BEGUN.wave.set()
    steps = Steps(lambda node: time.sleep(0.2) if node.name == "web" else None, places=1)
    schedule(tmp_path, overlapping(), steps).run()
    assert (steps.begun, steps.together) == (["web", "training"], 1)


def test_a_pipeline_that_fails_ends_the_training_beside_it(tmp_path):
    BEGUN.wave.set()
    started = threading.Event()

    def work(node: Node) -> None:
        if node.name == "web":
            assert started.wait(60)
            raise ConfigError("no such thing", where="there", fix="do this")
        started.set()
        assert steps.interrupted.wait(60)
        raise RuntimeError("cancelled")

    steps = Steps(work)
    with pytest.raises(StepsFailed) as failed:
        schedule(tmp_path, overlapping(), steps).run()
    assert "step web failed: there: no such thing" in str(failed.value)
    assert "step training failed: /nowhere/training: stopped, because web failed" in str(failed.value)


def test_a_training_that_ended_before_a_pipeline_that_fails_is_not_published(tmp_path):
    BEGUN.wave.set()
    ended = threading.Event()

    def work(node: Node) -> None:
        if node.name == "training":
            ended.set()
        else:
            assert ended.wait(60)
            raise ConfigError("no such thing")

    with pytest.raises(StepsFailed, match="stopped, because web failed"):
        schedule(tmp_path, overlapping(), Steps(work)).run()
    assert Records(str(tmp_path)).published(overlapping()[1]) is None
