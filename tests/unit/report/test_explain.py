"""What `tidewheel explain` makes of recorded runs: a failure of each cause, its place, its cost; the run's health."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tidewheel import storage
from tidewheel.cli import run_command
from tidewheel.cluster.node_history import NodeHistory
from tidewheel.commit_log import CommitLog
from tidewheel.lease import Holder
from tidewheel.report.explain.account import Account, account
from tidewheel.report.explain.causes import ALONE, CAUSES, of_error
from tidewheel.report.explain.health import State
from tidewheel.report.explain.section import section
from tidewheel.report.explain.text import as_json, lines
from tidewheel.report.run import write_run_report

A, B, C = "a1" * 28, "b2" * 28, "c3" * 28
HOSTS = {A: "10.0.0.1", B: "10.0.0.2", C: "10.0.0.3"}
BEGAN = 1_790_000_000.0


class Recorded:
    """Writes the files of a run of two workers on nodes A and B; times are seconds since it began."""

    def __init__(self, folder: Path) -> None:
        self.store = storage.store(folder)
        self.log: Any = None
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.ledger: list[dict[str, Any]] = []
        self.store.write_json("run.json", {"id": "night", "config": {"steps": 100}})

    def event(self, time: float, kind: str, **detail: Any) -> Recorded:
        self.events.append({"time": BEGAN + time, "kind": kind, "detail": detail})
        return self

    def train(self, start: float, steps: range, generation: int, *nodes: str, redone: int = 0) -> Recorded:
        """Do a step each second on one worker of each node."""
        for at, step in enumerate(steps):
            end = start + at + 1
            self.metrics.append({"time": BEGAN + end, "step": step, "loss": 2.0, "step_seconds": 1.0,
                                 "generation": generation, "world_size": len(nodes)})
            for rank, node in enumerate(nodes):
                self.ledger.append({"rank": rank, "generation": generation, "node": node[:12], "start": BEGAN + end - 1,
                                    "end": BEGAN + end, "category": "redone" if at < redone else "productive"})
        return self

    def begin(self) -> Recorded:
        self.event(0, "driver_start", first_generation=0, epoch=0)
        return self.event(2, "start", step=0, world_size=2, generation=0, redo=0).train(2, range(1, 11), 0, A, B)

    def fail(self, time: float, error: str, *, generation: int = 0, node: str = B, rank: int = 1, step: int = 10,
             restart: bool = True) -> Recorded:
        return self.event(time, "failure", generation=generation, ranks=[rank], nodes=[node], hosts=[HOSTS[node]],
                          step=step, error=error, recovery="in_place" if restart else "none", restart=restart)

    def told(self, now: float = 1e6) -> Account:
        for name in ("events", "metrics", "ledger"):
            self.store.write(f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in getattr(self, name)).encode())
        return account(self.store.uri, now=BEGAN + now)


@pytest.fixture
def run(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "night")


ERRORS = {
    "its process has ended, or is cut off": "worker_killed",
    "its process has ended": "worker_killed",
    "LostWorkerError: worker a on node b: The actor died unexpectedly": "worker_killed",
    "node 10.0.0.2 is gone": "node_lost",
    "no sign of life for 3.1 s": "frozen",
    "did not leave within 5.0 s": "frozen",
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": "out_of_memory",
    "RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory": "out_of_memory",
    "MemoryError: ": "out_of_memory",
    "LostWorkerError: Task was killed due to the node running low on memory.": "out_of_memory",
    "HangError: rank 1 is still at step 5 (forward); rank 0 has waited 60 s": "hang",
    "SilentCorruptionError: silent corruption at step 7: gradient of rank 1": "corruption",
    "AcceleratorError: CUDA error: uncorrectable ECC error encountered": "gpu",
    "StorageAwayError: s3://b/run: the object store takes requests but does not answer in time": "storage",
    "StorageError: cannot write: No space left on device": "disk_full",
    "OSError: [Errno 28] No space left on device": "disk_full",
    "ShardError: x.arrow: hash differs: the content has changed": "bad_data",
    "CheckpointError: no intact checkpoint": "damaged_checkpoint",
    "ConfigError: runs/x: loss is not finite at step 7": "non_finite",
    "ConfigError: runs/x: loss spike at step 9 after 3 rollbacks": "loss_spike",
    "ConfigError: batch.virtual_ranks 3 is no multiple of 2": "configuration",
    "TypeError: unsupported operand": "configuration",
    "RuntimeError: [../gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1": "network",
    "DistStoreError: wait timeout after 300000ms, keys: /generation/4/1//cpu//0/1": "network",
    "its probe failed: ProbeError: 3 of 262144 entries of a matrix product are wrong on cpu": "probe_failed",
    "RuntimeError: something else": "error",
}


@pytest.mark.parametrize(("text", "key"), ERRORS.items())
def test_an_error_names_its_cause(text: str, key: str) -> None:
    assert of_error(text) == key


def test_every_cause_says_what_to_do() -> None:
    for cause in CAUSES.values():
        assert cause.advice.endswith("."), cause.key
    assert {key for key, _ in ALONE.values()} <= CAUSES.keys()
    assert set(ERRORS.values()) <= CAUSES.keys()


@pytest.mark.parametrize(("text", "key"), ERRORS.items())
def test_a_failure_has_its_cause_place_and_cost(run: Recorded, text: str, key: str) -> None:
    run.begin().fail(13, text).event(16, "resume", step=8, world_size=1, generation=1, redo=2)
    run.train(16, range(9, 21), 1, A, redone=2)
    told = run.told()
    start, failure = told.incidents
    assert (start.cause.key, failure.cause.key) == ("start", key)
    assert (failure.nodes, failure.ranks, failure.workers) == (("10.0.0.2",), (1,), (2, 1))
    assert (failure.redone, failure.text) == (2, text)
    # by hand: two workers wait for 1 s until the failure is noticed, one restarts for 3 s and repeats 2 s
    assert failure.cost == pytest.approx({"detection": 2.0, "restart": 3.0, "redone": 2.0})
    assert failure.pause == pytest.approx(5.0)
    [item] = [item for item in told.causes if item.cause.key == key]
    assert (item.times, item.redone, item.seconds) == (1, 2, pytest.approx(7.0))
    assert told.failures == 1
    assert not told.repeaters


def test_a_lost_node_and_the_end_of_its_workers_are_one_incident(run: Recorded) -> None:
    run.begin().fail(13, "its process has ended, or is cut off")
    run.event(16, "resume", step=10, world_size=1, generation=1, redo=0).train(16, range(11, 30), 1, A)
    run.event(21, "node_lost", node=B, host=HOSTS[B])
    [_, failure] = run.told().incidents
    assert (failure.cause.key, failure.nodes, failure.times) == ("node_lost", ("10.0.0.2",), 1)


def test_another_node_that_is_lost_is_another_incident(run: Recorded) -> None:
    run.begin().fail(13, "its process has ended, or is cut off")
    run.event(16, "resume", step=10, world_size=1, generation=1, redo=0).train(16, range(11, 30), 1, A)
    run.event(21, "node_lost", node=C, host=HOSTS[C])
    assert [item.cause.key for item in run.told().incidents] == ["start", "worker_killed", "node_lost"]


def test_a_drain_is_planned_and_the_end_of_its_node_is_no_failure(run: Recorded) -> None:
    run.begin().event(8, "node_draining", node=B, host=HOSTS[B]).event(12, "resize_asked", to=1, reason="drain")
    run.event(13, "resize", generation=0, to=1, reason="drain", step=10, **{"from": 2})
    run.event(14, "resume", step=10, world_size=1, generation=1, redo=0).train(14, range(11, 40), 1, A)
    run.event(30, "node_lost", node=B, host=HOSTS[B])
    told = run.told()
    assert [(item.cause.key, item.nodes, item.workers) for item in told.incidents[1:]] == [
        ("drain", ("10.0.0.2",), (2, 1))]
    assert told.failures == 0
    assert not told.repeaters
    assert "Nothing has failed." in list(lines(told))


def test_a_hang_names_the_rank_that_was_found(run: Recorded) -> None:
    run.begin().event(70, "hang", found="rank 1 is still at step 11 (forward); rank 0 has waited 60 s at step 11")
    run.fail(72, "HangError: rank 1 is still at step 11 (forward)")
    run.event(75, "resume", step=10, world_size=2, generation=1, redo=0).train(75, range(11, 20), 1, A, B)
    [_, hang] = run.told().incidents
    assert (hang.cause.key, hang.ranks, hang.nodes) == ("hang", (1,), ("10.0.0.2",))
    assert hang.text.startswith("rank 1 is still at")


def test_corruption_names_the_nodes_of_its_evidence(run: Recorded) -> None:
    run.begin().event(12, "corruption", step=10, since=6, back_to=5, what="gradient of rank 0", ranks=[0],
                      nodes=[A[:12]])
    run.event(12.5, "failure", generation=0, ranks=[0], nodes=[A], hosts=[HOSTS[A]], step=10,
              error="SilentCorruptionError: gradient of rank 0", recovery="in_place", restart=True)
    run.event(15, "resume", step=5, world_size=1, generation=1, redo=5).train(15, range(6, 20), 1, B, redone=5)
    [_, found] = run.told().incidents
    assert (found.cause.key, found.nodes, found.redone) == ("corruption", ("10.0.0.1",), 5)
    assert found.text == "gradient of rank 0"


def test_a_rollback_costs_the_steps_that_it_undoes(run: Recorded) -> None:
    run.begin().event(12, "guard", step=10, reason="loss spike", action="rollback")
    run.event(12.2, "rollback", step=10, back_to=6, reason="loss spike").train(12.2, range(7, 30), 0, A, B, redone=4)
    [_, spike] = run.told().incidents
    assert (spike.cause.key, spike.redone, spike.cost) == ("loss_spike", 4, {"redone": pytest.approx(8.0),
                                                                            "idle": pytest.approx(0.4)})


def test_skipped_steps_and_failed_saves_are_summed(run: Recorded) -> None:
    run.begin()
    for step in (3, 4, 5):
        run.event(2 + step, "guard", step=step, reason="loss is nan", action="skip")
        run.event(2.1 + step, "save_failed", step=step, reason="no answer from s3://bucket", in_a_row=step)
    told = run.told()
    assert {item.cause.key: item.times for item in told.causes} == {"start": 1, "non_finite": 3, "storage": 3}
    assert [item.times for item in told.incidents] == [1, 3, 3]


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, (key, _) in ALONE.items()])
def test_events_that_stand_for_themselves_have_a_cause(run: Recorded, kind: str, key: str) -> None:
    told = run.begin().event(9, kind, slow_rank=1, reason="r", error="r", found="r").told()
    assert [item.cause.key for item in told.incidents] == ["start", key]
    if "straggler" in kind or "slow" in kind:
        assert told.incidents[1].nodes == (B[:12],)


@pytest.mark.parametrize(("ended", "key"), [
    ([], "driver_lost"), ([("stopped", {"step": 10})], "user_stop"), ([("taken_over", {})], "taken_over"),
    ([("failure", {"restart": False, "ranks": [], "error": "ConfigError: x"})], "start")])
def test_the_cause_of_a_later_start_is_how_the_driver_before_it_ended(run: Recorded, ended: Any, key: str) -> None:
    run.begin()
    for kind, detail in ended:
        run.event(13, kind, **detail)
    run.event(50, "driver_start", first_generation=1_000_000, epoch=1)
    run.event(54, "resume", step=8, world_size=2, generation=1_000_000, redo=2)
    run.train(54, range(9, 15), 1_000_000, A, B, redone=2)
    told = run.told()
    assert [item.cause.key for item in told.incidents if item.time == BEGAN + 50] == [key]
    assert sum(item.redone for item in told.incidents) == 2


def test_a_driver_that_starts_another_coordinator_is_told_apart_from_another_driver(run: Recorded) -> None:
    run.begin()
    run.event(50, "driver_start", first_generation=1_000_000, epoch=1).event(50.1, "coordinator_lost", error="it died")
    run.event(54, "resume", step=8, world_size=2, generation=1_000_000, redo=2)
    run.train(54, range(9, 15), 1_000_000, A, B, redone=2)
    assert [item.cause.key for item in run.told().incidents if item.time == BEGAN + 50] == ["coordinator_lost"]


def test_an_upload_of_a_former_driver_is_no_fault_of_the_storage(run: Recorded) -> None:
    run.begin().event(9, "upload_failed", reason="s3://b/run: the run was taken over by process 1 on vm at 3 (epoch 1)")
    run.event(9.5, "upload_failed", reason="[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    run.event(10, "upload_failed", reason="503 slow down")
    assert [(item.cause.key, item.text) for item in run.told().incidents[1:]] == [("storage", "503 slow down")]


def test_a_save_that_a_lost_worker_broke_off_is_no_fault_of_the_storage(run: Recorded) -> None:
    lost = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    run.begin().event(9, "save_failed", checkpoint="step_00000004", step=4, reason=lost)
    run.event(10, "save_failed", checkpoint="step_00000005", step=5, reason="Connection reset by peer")
    told = [(item.cause.key, item.text) for item in run.told().incidents[1:]]
    assert told == [("storage", "Connection reset by peer")]


def test_waiting_for_other_workers_counts_as_goodput(run: Recorded) -> None:
    run.begin()
    before = run.told().goodput
    assert before is not None
    for line in run.ledger[::2]:
        line["category"] = "communication"
    assert run.told().goodput == before


def test_a_local_run_that_was_killed_and_goes_on(run: Recorded) -> None:
    run.event(2, "start", step=0, world_size=1, generation=0, redo=0).train(2, range(1, 11), 0, A)
    run.event(40, "resume", step=8, world_size=1, generation=1_000_000, redo=2)
    run.train(40, range(9, 15), 1_000_000, A, redone=2)
    assert [(item.cause.key, item.redone) for item in run.told().incidents] == [("start", 0), ("driver_lost", 2)]


def test_nodes_that_fail_more_than_once_are_named_and_text_is_escaped(run: Recorded, capsys: Any) -> None:
    run.begin()
    for at, text in enumerate(("no sign of life for 3 s", "RuntimeError: \x1b[31mboo\u202e", "HangError: rank 1")):
        run.fail(20 + 10 * at, text, generation=at).event(
            24 + 10 * at, "resume", step=10, world_size=2, generation=at + 1, redo=0)
    run.fail(60, "RuntimeError: x", node=A, rank=0)
    told = run.told()
    assert {node: counts.total() for node, counts in told.repeaters.items()} == {"10.0.0.2": 3}
    text = "\n".join(lines(told))
    assert "10.0.0.2: worker frozen x 1, error of a worker x 1, hang x 1" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    json.dumps(as_json(told))
    assert run_command(["explain", run.store.uri]) == 2  # no driver trains it
    assert "\x1b" not in capsys.readouterr().out
    assert run_command(["explain", run.store.uri, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["failed_more_than_once"]["10.0.0.2"]["hang"] == 1


def test_nodes_that_failed_in_several_runs_are_told_with_their_exclusion(run: Recorded, tmp_path: Path) -> None:
    for name in ("one", "two"):
        history = NodeHistory(storage.store(tmp_path), f"runs/{name}")
        history.append("10.0.0.2", "no sign of life for 3 s", BEGAN - 100)
        history.close()
    told = run.begin().told(now=20)
    [line] = told.history
    assert (line.host, line.failures, line.runs, line.excluded_until) == ("10.0.0.2", 2, 2, BEGAN - 100 + 3600)
    text = "\n".join(lines(told))
    assert "10.0.0.2: 2 failures in 2 runs, the newest at 2026-09-21 14:11 (no sign of life for 3 s); new runs " \
           "avoid it, if they can, until 2026-09-21 15:11" in text
    assert as_json(told)["node_history"][0]["host"] == "10.0.0.2"
    later = run.told(now=4_000)
    assert "avoid" not in "\n".join(lines(later))  # new runs use it again
    assert as_json(later)["node_history"][0]["excluded_until"] is None
    assert not run.told(now=90_000).history  # a day later


def test_a_run_of_another_release_with_other_settings_is_explained(run: Recorded) -> None:
    run.store.write_json("run.json", {"id": "night", "config": {"elastic": {"node_checks": {"unknown": 1}}}})
    assert run.begin().told(now=20).history == ()


def test_the_work_for_a_run_with_many_events_grows_with_their_number(run: Recorded) -> None:
    """A month in which storage was often unavailable: looking through all events for each one took minutes."""
    run.begin()
    for number in range(12_000):
        run.event(20 + 700 * number, "storage_away", reason="timed out")
        run.event(21 + 700 * number, "save", step=number)
    began = time.process_time()
    told = run.told(now=1e8)
    assert len(told.incidents) == 12_001
    assert time.process_time() - began < 6


def test_a_node_that_is_left_out_is_told(run: Recorded) -> None:
    told = run.begin().event(9, "node_excluded", host="10.0.0.3", failures=2, runs=1, reason="x").told()
    assert (told.incidents[1].cause.key, told.incidents[1].nodes, told.failures) == ("excluded", ("10.0.0.3",), 0)


# -- health ------------------------------------------------------------------------------------
@pytest.fixture
def owned(run: Recorded, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Return a run whose driver wrote its record when the run began, and is alive."""
    monkeypatch.setattr("tidewheel.commit_log.time.time", lambda: BEGAN)
    run.log = CommitLog(run.store.child("checkpoints"))
    record = run.log.take_over(Holder.me(), None)
    assert record is not None
    run.log.beat(record.epoch, 1)
    return run


def test_a_run_that_trains_is_healthy(owned: Recorded) -> None:
    told = owned.begin().told(now=14)
    assert (told.health.state, told.health.healthy) == (State.TRAINING, True)


def test_a_driver_without_heartbeats_is_gone(owned: Recorded) -> None:
    assert owned.begin().told(now=500).health.state is State.DEAD


def test_a_driver_whose_process_has_ended_is_gone(owned: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holder, "is_gone", lambda self: True)
    told = owned.begin().told(now=14)
    assert told.health.state is State.DEAD
    assert socket.gethostname() in told.health.text


def test_a_run_without_steps_stands_still(owned: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    owned.begin()
    monkeypatch.setattr("tidewheel.commit_log.time.time", lambda: BEGAN + 95)
    owned.log.beat(owned.log.head().epoch, 9)
    assert owned.told(now=40).health.state is State.TRAINING
    assert owned.told(now=100).health.state is State.STALLED


def test_a_run_recovers_and_failing_saves_need_attention(owned: Recorded) -> None:
    owned.begin().fail(13, "no sign of life for 3 s")
    assert owned.told(now=15).health.state is State.RECOVERING
    owned.event(16, "resume", step=10, world_size=1, generation=1, redo=0).train(16, range(11, 13), 1, A)
    owned.metrics[-1]["failed_saves"] = 4
    told = owned.told(now=19)
    assert (told.health.state, told.health.healthy) == (State.TRAINING, False)
    assert "4 saves have failed: a failure now would cost 12 steps" in told.health.problems[0]


@pytest.mark.parametrize(("last", "state"), [
    (("stopped", {"step": 10}), State.STOPPED),
    (("failure", {"restart": False, "ranks": [0], "error": "ConfigError: x", "generation": 0}), State.FAILED)])
def test_how_a_run_ended(owned: Recorded, last: Any, state: State) -> None:
    owned.begin().event(13, last[0], **last[1])
    owned.log.release(owned.log.head().epoch)
    told = owned.told(now=15)
    assert (told.health.state, told.health.healthy) == (state, state is State.STOPPED)


def test_a_run_that_ended_by_an_error_without_a_text_is_explained(owned: Recorded) -> None:
    owned.begin().fail(13, "", restart=False)
    owned.log.release(owned.log.head().epoch)
    told = owned.told(now=15)
    assert told.health.state is State.FAILED
    assert told.health.text.startswith("ended by an error: none was recorded;")


def test_a_finished_run_is_healthy(owned: Recorded) -> None:
    owned.store.write_json("result.json", {"steps": 10})
    assert owned.begin().told().health.state is State.FINISHED


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert run_command(["explain", str(tmp_path)]) == 2
    assert "not the folder of a run" in " ".join(capsys.readouterr().err.split())


def test_the_report_has_the_same_account(run: Recorded) -> None:
    run.begin().fail(13, "RuntimeError: <script>x</script>").event(
        16, "resume", step=8, world_size=1, generation=1, redo=2)
    run.train(16, range(9, 21), 1, A, redone=2).told()
    html = run.store.read(write_run_report(run.store.uri).rpartition("/")[2]).decode()
    section = html[html.index("What went wrong"):html.index("<h2>Loss")]
    assert "10.0.0.2" in section
    assert "&lt;script&gt;x" in section
    assert "<code>tidewheel logs" in section


def test_a_run_in_which_nothing_happened_has_no_section(run: Recorded) -> None:
    run.store.write_json("result.json", {"steps": 10})
    assert section(run.begin().told()) == []
