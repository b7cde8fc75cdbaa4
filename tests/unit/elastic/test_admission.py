"""Tests of admission: what is excluded with a blamed worker, and how others come back through a probe."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from tidewheel.elastic.admission import TEXT_CHARACTERS, Admission
from tidewheel.elastic.blame import Blame, Exclusion, Fault, Level
from tidewheel.elastic.generation import Generation, Worker
from tidewheel.elastic.messages import CoordinatorMessage, Probe
from tidewheel.elastic.policy import Backoff

PROBE_SECONDS = 60.0


class Outbox:
    """Records the decisions."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, CoordinatorMessage]] = []
        self.fenced: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def send(self, worker: str, message: CoordinatorMessage) -> None:
        self.sent.append((worker, message))

    def send_all(self, workers: Collection[str], message: CoordinatorMessage) -> None:
        raise AssertionError("admission speaks to single workers")

    def fence(self, worker: str) -> None:
        self.fenced.append(worker)

    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        self.events.append((kind, detail))

    def unheard(self, worker: str) -> float:
        return 0.0

    def form(self, generation: Generation) -> None:
        raise AssertionError("admission forms no generation")


@pytest.fixture
def world() -> tuple[Admission, Outbox, dict[str, Worker]]:
    """Two nodes with two GPUs each: a0, a1, b0, b1."""
    known = {f"{node}{device}": Worker(f"{node}{device}", node, connected=True, device=device)
             for node in "ab" for device in "01"}
    outbox = Outbox()
    return Admission((2, 4), Blame(Backoff(60.0, 3600.0)), outbox, known, PROBE_SECONDS), outbox, known


def fault(known: dict[str, Worker], name: str, text: str = "CUDA error") -> Fault:
    worker = known[name]
    return Fault(worker=name, node=worker.node, device=worker.device, kind="RuntimeError", text=text,
                 fatal=False, furthest=0)


@pytest.mark.parametrize(("level", "device", "suspects"), [
    (Level.PROCESS, "0", set()), (Level.DEVICE, "0", {"twin"}), (Level.NODE, "", {"twin", "a1"})])
def test_workers_of_the_excluded_device_or_node_must_pass_a_probe(world, level: Level, device: str, suspects: set[str]):
    admission, outbox, known = world
    known["twin"] = Worker("twin", "a", connected=True, device="0")
    admission.leave_out(fault(known, "a0", "x" * 1000), Exclusion(level, "a", device, 60.0, 60.0, 1))
    assert outbox.fenced == ["a0"]
    assert "a0" not in known
    assert {name for name, worker in known.items() if not worker.cleared} == suspects
    [(kind, detail)] = outbox.events
    assert (kind, detail["worker"], len(detail["reason"])) == ("worker_left_out", "a0", TEXT_CHARACTERS)
    assert {worker.name for worker in admission.available()} == set(known) - suspects


@pytest.mark.parametrize(("level", "others", "expected"), [
    (Level.PROCESS, 2, True), (Level.PROCESS, 1, False), (Level.NODE, 2, False)])
def test_a_fault_is_spared_only_if_enough_workers_remain(world, level: Level, others: int, expected: bool):
    admission, _, known = world
    cause = fault(known, "a0")
    for name in ["b0", "b1"] if level is Level.NODE else list(known)[others + 1:]:
        known[name].leaving = True
    assert admission.spares(lambda worker: worker.available)(cause, level) is expected


def test_a_worker_is_asked_once_and_is_late_after_the_limit(world):
    admission, outbox, known = world
    known["b1"].cleared = False
    assert admission.probe(100.0) == []
    assert admission.probe(101.0) == []
    assert outbox.sent == [("b1", Probe())]
    assert admission.probe(100.0 + PROBE_SECONDS) == []
    assert admission.probe(100.5 + PROBE_SECONDS) == [known["b1"]]
    assert known["b1"].probed_at is None
    admission.readmit(known["b1"])
    assert outbox.events[-1] == ("worker_readmitted", {"worker": "b1", "node": "b", "device": "1"})
    assert known["b1"] in admission.available()


def test_a_worker_of_an_excluded_node_is_asked_when_the_exclusion_is_over(world):
    admission, outbox, known = world
    both = [fault(known, "a0"), fault(known, "a1")]
    exclusion = admission.blame.judge(both, lambda fault, level: True, 0.0).out
    assert exclusion is not None
    assert exclusion.level is Level.NODE
    admission.leave_out(both[0], exclusion)
    admission.probe(exclusion.until - 1.0)
    assert outbox.sent == []
    admission.probe(exclusion.until)
    assert outbox.sent == [("a1", Probe())]


def test_a_process_that_did_not_pass_its_probe_ends_and_leaves_others_of_its_node_alone(world):
    admission, outbox, known = world
    admission.refuse(fault(known, "a0"), 0.0)
    assert outbox.fenced == ["a0"]
    assert known["a1"].cleared
    assert outbox.events[0][1]["level"] == "process"
