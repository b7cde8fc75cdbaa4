"""Logs of the coordinator, agents and evaluator go to the run's logs/ and never stop the control plane."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from queue import SimpleQueue

import pytest

from tidewheel import cli, storage
from tidewheel.elastic.client import Client
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.evaluator import EvaluationActor
from tidewheel.elastic.messages import ExitReason, Hello, Left, StepDone
from tidewheel.elastic.process_log import LogTarget, ProcessLog
from tidewheel.ownership import acquire
from tidewheel.train import node_log
from tidewheel.train.logs import worker_log
from tidewheel.train.logs.config import LogsConfig
from tidewheel.train.logs.line import HERE, LogLine
from tidewheel.train.logs.read import LineFilter, RunLogs

logger = logging.getLogger(__name__)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogTarget:
    node = tmp_path / "node"
    node.mkdir()
    monkeypatch.setattr(node_log.tempfile, "tempdir", str(node))
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)  # the real one asks Ray
    HERE.begin(0, 0)  # the state of a new process
    return LogTarget(str(tmp_path / "run"), "demo", LogsConfig())


def lines(target: LogTarget, **selection: int) -> list[LogLine]:
    return RunLogs(storage.store(target.uri)).new(LineFilter(**selection))


def coordinator(target: LogTarget) -> Coordinator:
    epoch = acquire(storage.store(target.uri)).epoch
    started = Coordinator(target.uri, epoch=epoch, log=target, node="node 1")
    started.start("127.0.0.1")
    return started


def train_one_step(running: Coordinator) -> None:
    """Let a worker join, do one step and finish."""
    received: SimpleQueue[object] = SimpleQueue()
    endpoint = running.endpoint()
    running.expect({"a": "n"}, True)
    client = Client(endpoint.address, Hello("a", "n", endpoint.token), received.put, print)
    join = received.get(timeout=60)
    client.send(StepDone(join.generation, 3, 3, {}))
    client.send(Left(join.generation, ExitReason.FINISHED))
    assert received.get(timeout=60).type == "over"
    client.close()


@pytest.mark.parametrize("role", ["coordinator", "agent", "evaluator"])
def test_lines_and_output_have_the_role_in_place_of_a_rank(target: LogTarget, role: str):
    log = ProcessLog(target, role, "node 1")
    logger.info("a record")
    os.write(2, b"printed\n")
    log.close()
    log.close()  # a second call changes nothing
    [record, printed] = lines(target)
    assert [line.text for line in (record, printed)] == ["a record", "printed"]
    assert {line.role for line in (record, printed)} == {role}
    assert f" demo generation=0 role={role} step=0 {__name__}: a record" in record.as_text()
    assert "rank=" not in record.as_text()
    assert lines(target, rank=0) == []
    [key] = [entry.key for entry in storage.store(target.uri).list("logs")]
    assert key.startswith(f"logs/control/{role}-")


def test_the_command_shows_their_lines_beside_the_workers_lines(target: LogTarget, capsys: pytest.CaptureFixture[str]):
    store = storage.store(target.uri)
    with worker_log.logging_process(LogsConfig(), store, run="demo", node="a", capture=False):
        logger.info("from a worker")
    log = ProcessLog(target, "agent", "a")
    logger.info("from an agent")
    log.close()
    assert cli.run_command(["logs", target.uri]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in shown] == ["from a worker", "from an agent"]
    assert ["rank=0" in line for line in shown] == [True, False]
    assert cli.run_command(["logs", target.uri, "--rank", "0"]) == 0
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()] == ["from a worker"]
    assert cli.run_command(["logs", target.uri, "--rank", "1"]) == 0
    assert "there are lines of ranks 0 and generations 0" in capsys.readouterr().err


def test_the_coordinator_logs_what_happens(target: LogTarget):
    running = coordinator(target)
    train_one_step(running)
    running.end()
    log_lines = lines(target)
    generation = running.snapshot().generation
    texts = [line.text for line in log_lines]
    assert "worker a on node n is connected" in texts
    begins = log_lines[texts.index(f"generation {generation} begins with 1 workers")]
    assert (begins.role, begins.generation, begins.step) == ("coordinator", generation, 0)
    assert any(text.startswith("event driver_start ") for text in texts)
    assert texts[-1] == "the coordinator ends: the run is over"
    assert log_lines[-1].step == 3


def test_the_evaluator_logs_what_it_does(target: LogTarget):
    evaluator = EvaluationActor(target.uri, 10, "cpu", target, "node 1")
    evaluator.end()
    [line] = lines(target)
    assert (line.role, line.text) == ("evaluator", "the evaluator looks for a checkpoint every 10 steps, on cpu")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("wrong"), MemoryError()])
def test_a_log_that_cannot_begin_does_not_stop_the_coordinator(target: LogTarget, monkeypatch: pytest.MonkeyPatch,
                                                               error: BaseException,
                                                               caplog: pytest.LogCaptureFixture):
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(worker_log, "logging_process", broken)
    running = coordinator(target)
    train_one_step(running)
    running.end()
    assert "the log of this coordinator is not kept" in caplog.text
    assert lines(target) == []


def test_a_store_that_refuses_logs_does_not_stop_the_coordinator(target: LogTarget, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_log, "CLOSE_SECONDS", 0.2)
    Path(target.uri).mkdir()
    (Path(target.uri) / "logs").write_text("a file where the folder should be")
    running = coordinator(target)
    train_one_step(running)
    began = time.monotonic()
    running.end()
    assert time.monotonic() - began < 30
    assert running.snapshot().progress["step"] == 3


def test_a_log_that_cannot_end_is_reported(target: LogTarget, caplog: pytest.LogCaptureFixture):
    log = ProcessLog(None, "agent", "a")
    log._open.callback(lambda: 1 / 0)
    log.close()
    assert "the last lines of this agent were not written" in caplog.text
