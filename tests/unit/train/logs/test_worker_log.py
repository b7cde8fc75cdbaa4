"""A worker's log holds all that it said: through a kill, a store that is away, and native output."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tidewheel import jsonlog, storage
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import StorageAwayError
from tidewheel.train import node_log
from tidewheel.train.logs import worker_log
from tidewheel.train.logs.config import LogsConfig
from tidewheel.train.logs.line import HERE, PRINTED, LogLine
from tidewheel.train.logs.read import LineFilter, RunLogs
from tidewheel.train.logs.worker_log import logging_process, pass_on_abandoned

logger = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def _own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_log.tempfile, "gettempdir", lambda: str(tmp_path / "node"))
    (tmp_path / "node").mkdir()


@pytest.fixture
def place(tmp_path: Path) -> storage.Store:
    return storage.store(tmp_path / "runs" / "run")


def lines(place: storage.Store, **wanted) -> list[LogLine]:
    return RunLogs(place).new(LineFilter(**wanted))


def wait(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def left_on_the_node(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "node").rglob("*") if path.suffix in (".raw", ".state")]


def test_records_carry_where_the_worker_was(place: storage.Store, tmp_path: Path):
    logging.getLogger("chatty").setLevel(logging.DEBUG)
    with logging_process(LogsConfig(), place, run="run", node="a b", capture=False):
        HERE.begin(2, 5)
        HERE.step = 17
        logger.info("read %d rows", 3)
        logger.debug("not written")
        logging.getLogger("chatty").debug("nor is this, of a logger with a level of its own")
        logging.getLogger("botocore.auth").info("signed with ...")
        HERE.step = 18
        try:
            raise ValueError("broken")
        except ValueError:
            logger.exception("it failed")
    first, second = lines(place)
    assert (first.level, first.logger, first.text) == ("info", __name__, "read 3 rows")
    assert (first.run, first.generation, first.rank, first.step) == ("run", 2, 5, 17)
    assert second.step == 18
    assert second.text.startswith("it failed\nTraceback")
    assert second.text.endswith("ValueError: broken")
    assert left_on_the_node(tmp_path) == []


def test_printed_and_native_output_is_kept_and_still_goes_where_it_went(place: storage.Store, tmp_path: Path,
                                                                        capfd: pytest.CaptureFixture[str],
                                                                        monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "opensesame")
    beside = tmp_path / "ray"
    beside.mkdir()
    with logging_process(LogsConfig(format="json"), place, run="run", node="a", capture=True, beside=beside):
        HERE.begin(0, 1)
        os.write(1, b"from Python, with opensesame\n")  # pytest's sys.stdout is another file
        libc = ctypes.CDLL(None)
        libc.write(1, b"from C\n", 7)
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        logger.info("a record")
        os.write(2, b"no end")
        logger.warning("behind it")
        os.write(2, b"x" * 200_000)
    result = lines(place)
    assert [line.text for line in result][:6] == [
        "from Python, with [hidden]", "from C", "from a child", "a record", "no end", "behind it"]
    assert [line.logger for line in result][:6] == [PRINTED, PRINTED, PRINTED, __name__, PRINTED, __name__]
    assert "".join(line.text for line in result[6:]) == "x" * 200_000  # long lines are cut, and nothing is lost
    captured = capfd.readouterr()
    assert captured.err.startswith("from Python, with [hidden]\nfrom C\nfrom a child\nno end\nbehind it\nxxx")
    assert "a record" not in captured.err
    copies = [LogLine.of_json(json.loads(line)) for path in beside.glob("tidewheel-run-*.log")
              for line in path.read_text().splitlines()]
    assert copies == result
    os.write(1, b"not ours any more\n")
    assert "not ours any more" in capfd.readouterr().out


class RaysHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Stands for `ray._private.log.PlainRayHandler`, which prints all records of Ray's workers."""


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("kind", [logging.StreamHandler, RaysHandler])
def test_a_record_that_is_printed_too_is_kept_once(place: storage.Store, kind: type[logging.Handler], capture: bool):
    root = logging.getLogger()
    with open(2, "w", closefd=False) as stream:
        printing = kind(stream)
        root.addHandler(printing)
        with logging_process(LogsConfig(), place, run="run", node="a", capture=capture):
            logger.info("a record")
        assert printing in root.handlers
        root.removeHandler(printing)
    assert [(line.logger, line.text) for line in lines(place)] == [(__name__, "a record")]


def _killed(uri: str, node: str) -> None:
    """Say things, and end by SIGKILL before the thread looks again."""
    worker_log.POLL_SECONDS = 3600.0  # type: ignore[assignment]
    node_log.tempfile.tempdir = node
    with logging_process(LogsConfig(), storage.store(uri), run="run", node="a", capture=True):
        HERE.begin(4, 1)
        HERE.step = 9
        logger.warning("the last record")
        print("the last words, without an end", end="", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def kill_one(place: storage.Store, tmp_path: Path) -> None:
    code = f"from {__name__} import _killed; _killed({place.uri!r}, {str(tmp_path / 'node')!r})"
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'platform'}:{root}"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root)
    assert ended.returncode == -signal.SIGKILL


def check_killed(found: list[LogLine]) -> None:
    assert [line.text for line in found] == ["the last record", "the last words, without an end"]
    assert [(line.run, line.generation, line.rank, line.step) for line in found] == 2 * [("run", 4, 1, 9)]


def test_nothing_that_a_killed_worker_said_is_lost(place: storage.Store, tmp_path: Path):
    kill_one(place, tmp_path)
    assert lines(place) == []
    assert pass_on_abandoned(place) == 1
    check_killed(lines(place))
    assert left_on_the_node(tmp_path) == []
    assert pass_on_abandoned(place) == 0


def test_the_next_worker_of_the_node_passes_it_on(place: storage.Store, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch):
    kill_one(place, tmp_path)
    monkeypatch.setattr(worker_log, "ABANDONED_SECONDS", 0.0)
    with logging_process(LogsConfig(), place, run="run", node="a", capture=False):
        wait(lambda: len(lines(place)) == 2)
    check_killed(lines(place))


def test_on_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with S3Server() as server:
        bucket_store = storage.store(server.create_bucket("runs") + "/run")
        HERE.begin(0, 0)
        with logging_process(LogsConfig(), bucket_store, run="run", node="a", capture=False):
            logger.info("one")
        kill_one(bucket_store, tmp_path)
        with logging_process(LogsConfig(), bucket_store, run="run", node="a", capture=False):
            logger.info("two")
        result = lines(bucket_store)
        assert [line.text for line in result if line.rank != 1] == ["one", "two"]
        check_killed([line for line in result if line.rank == 1])
        assert all(entry.key.startswith("logs/workers/") for entry in bucket_store.list())


def test_an_unavailable_store_blocks_nobody_and_gets_its_lines_later(place: storage.Store, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_log, "CLOSE_SECONDS", 0.3)
    with monkeypatch.context() as broken:
        broken.setattr(jsonlog._File, "write", lambda *_: (_ for _ in ()).throw(StorageAwayError("away")))
        with logging_process(LogsConfig(), place, run="run", node="a", capture=False):
            for number in range(1000):
                logger.info("line %d", number)
    assert lines(place) == []
    assert len(left_on_the_node(tmp_path)) == 2
    assert pass_on_abandoned(place) == 1
    assert [line.text for line in lines(place)] == [f"line {number}" for number in range(1000)]


def test_a_buffer_that_is_full_drops_the_oldest_and_the_log_says_so(place: storage.Store,
                                                                    monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsonlog, "MAX_PENDING_BYTES", 20_000)
    monkeypatch.setattr(jsonlog, "RETRY_SECONDS", 0.0)
    write, away = jsonlog._File.write, [True]

    def fragile(self: jsonlog._File, data) -> None:
        if away[0]:
            raise StorageAwayError("away")
        write(self, data)

    monkeypatch.setattr(jsonlog._File, "write", fragile)
    with logging_process(LogsConfig(), place, run="run", node="a", capture=False):
        for number in range(1000):
            logger.info("line %d", number)
        log = worker_log._running[0]
        wait(lambda: log._reader.offset == os.fstat(log._output.descriptor).st_size)
        with log._passing:  # what was read has been handed over
            away[0] = False
    result = lines(place)
    dropped = [line for line in result if "missing here" in line.text]
    assert len(dropped) == 1
    assert dropped[0].level == "warning"
    assert int(dropped[0].text.split()[0]) + len(result) - 1 == 1000
    assert result[-1].text == "line 999"


def test_a_second_log_in_one_process_adds_nothing(place: storage.Store):
    with logging_process(LogsConfig(), place, run="run", node="a", capture=False):
        with logging_process(LogsConfig(), place, run="run", node="a", capture=False):
            logger.info("once")
        logger.info("and again")
    assert [line.text for line in lines(place)] == ["once", "and again"]


def test_space_on_the_node_is_given_back(place: storage.Store):
    with logging_process(LogsConfig(), place, run="run", node="a", capture=False):
        for _ in range(1000):
            logger.info("x" * 9000)
        log = worker_log._running[0]
        wait(lambda: log._output.state.offset > 8e6 and os.fstat(log._output.descriptor).st_blocks * 512 < 4e6)
