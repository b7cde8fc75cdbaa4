"""`tidewheel logs`: all workers in the order of time, what may be asked for, and what is said otherwise."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from tidewheel import cli, storage
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import ConfigError
from tidewheel.jsonlog import JsonLog
from tidewheel.train.logs.line import LogLine
from tidewheel.train.logs.read import LineFilter, RunLogs, parse_since

NOW = 1_790_000_000.0


def write(place: storage.Store, process: str, *given: tuple[float, str, int, int, str]) -> None:
    log = JsonLog(place, f"logs/workers/{process}.jsonl")
    for at, (seconds, level, generation, rank, text) in enumerate(given):
        log.append(LogLine(NOW + seconds, level, "run", generation, rank, 10 * generation, "a.b", text, process,
                           at).as_json())


def line(at: int, text: str) -> LogLine:
    return LogLine(NOW, "info", "run", 0, 0, 0, "a.b", text, "p0", at)


@pytest.fixture
def run(tmp_path: Path) -> str:
    run_store = storage.store(tmp_path / "run")
    write(run_store, "p0", (0.0, "info", 0, 0, "first"), (20.0, "warning", 1, 0, "fourth"),
          (20.0, "info", 1, 0, "fifth"))
    write(run_store, "p1", (10.0, "error", 0, 1, "second\x1b[2J"), (15.0, "debug", 0, 1, "third"))
    return run_store.uri


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.run_command(["logs", *arguments, "--json"]) == 0
    return [json.loads(line)["text"].partition("\x1b")[0] for line in capsys.readouterr().out.splitlines()]


def test_the_command_merges_and_selects(run: str, capsys: pytest.CaptureFixture[str]):
    assert shown(capsys, run) == ["first", "second", "third", "fourth", "fifth"]
    assert shown(capsys, run, "--rank", "1") == ["second", "third"]
    assert shown(capsys, run, "--generation", "1") == ["fourth", "fifth"]
    assert shown(capsys, run, "--level", "warning") == ["second", "fourth"]
    assert shown(capsys, run, "--since", "2026-09-21T14:13:35Z") == ["third", "fourth", "fifth"]


def test_text_has_every_part_and_moves_no_cursor(run: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run_command(["logs", run, "--rank", "1", "--level", "error"]) == 0
    assert capsys.readouterr().out == ("2026-09-21T14:13:30.000Z ERROR    run generation=0 rank=1 step=0 a.b: "
                                       "second\\x1b[2J\n")


def test_an_empty_result_lists_the_available_logs(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.run_command(["logs", run, "--rank", "7"]) == 0
    assert "no line matches; there are lines of ranks 0-1 and generations 0-1" in capsys.readouterr().err
    assert cli.run_command(["logs", str(tmp_path / "none")]) == 2
    assert "this is not a run" in capsys.readouterr().err
    storage.store(tmp_path / "old").write_json("run.json", {})
    assert cli.run_command(["logs", str(tmp_path / "old")]) == 2
    assert "no worker of this run has logged anything" in capsys.readouterr().err
    assert cli.run_command(["logs", run, "--since", "yesterday"]) == 2
    assert "'yesterday' is not a time" in capsys.readouterr().err
    assert cli.run_command(["logs", run, "--level", "loud"]) == 2
    assert "loud" in capsys.readouterr().err


def test_follow_shows_each_line_once_until_the_run_is_over(run: str, capsys: pytest.CaptureFixture[str],
                                                           monkeypatch: pytest.MonkeyPatch):
    run_store = storage.store(run)

    def next_look(seconds: float) -> None:
        write(run_store, "p2", (30.0, "info", 2, 0, "sixth"))
        run_store.write_json("result.json", {})

    monkeypatch.setattr("tidewheel.commands.logs.time.sleep", next_look)
    assert shown(capsys, run, "--follow") == ["first", "second", "third", "fourth", "fifth", "sixth"]


def test_a_line_that_two_processes_passed_on_is_shown_once(run: str):
    run_store = storage.store(run)
    again = LogLine(NOW + 11, "info", "run", 0, 1, 0, "a.b", "second", "p1", 0)
    JsonLog(run_store, "logs/workers/p1.jsonl").append(again.as_json())
    assert [line.text for line in RunLogs(run_store).new(LineFilter(rank=1))] == ["second\x1b[2J", "third"]


class Counted:
    """Counts the bytes that a store reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: storage.Store) -> None:
        self.bytes = 0
        read = type(place).read

        def counted(store: storage.Store, key: str, start: int = 0, length: int | None = None) -> bytes:
            content = read(store, key, start, length)
            self.bytes += len(content)
            return content

        monkeypatch.setattr(type(place), "read", counted)


@pytest.mark.parametrize("remote", [False, True])
def test_a_second_look_reads_only_what_was_added(remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with S3Server() if remote else contextlib.nullcontext() as server:
        if server is not None:
            server.create_bucket("runs")
        run_store = storage.store("s3://runs/one" if remote else tmp_path / "run")
        log = JsonLog(run_store, "logs/workers/p0.jsonl", 1e9)
        for at in range(200):
            log.append(line(at, "x" * 100).as_json())
        log.flush()
        logs = RunLogs(run_store)
        assert len(logs.new(LineFilter())) == 200
        log.append(line(200, "added").as_json())
        log.flush()
        counted = Counted(monkeypatch, run_store)
        assert [found.text for found in logs.new(LineFilter())] == ["added"]
        assert counted.bytes == len(json.dumps(line(200, "added").as_json(), separators=(",", ":"))) + 1
        assert logs.new(LineFilter()) == []
        assert counted.bytes < 300, "nothing was added: nothing is read"


def test_a_line_without_an_end_is_read_when_it_is_whole(tmp_path: Path):
    run_store = storage.store(tmp_path / "run")
    file = tmp_path / "run/logs/workers/p0.jsonl"
    file.parent.mkdir(parents=True)
    whole = json.dumps(line(0, "whole").as_json()).encode() + b"\n"
    file.write_bytes(whole + whole[:20])
    logs = RunLogs(run_store)
    assert [found.text for found in logs.new(LineFilter())] == ["whole"]
    assert logs.new(LineFilter()) == []
    file.write_bytes(whole + json.dumps(line(len(whole), "later").as_json()).encode() + b"\n")
    assert [found.text for found in logs.new(LineFilter())] == ["later"]


def test_times_that_may_be_asked_for():
    assert parse_since("90s", NOW) == NOW - 90
    assert parse_since("1.5h", NOW) == NOW - 5400
    assert parse_since("2026-09-21T14:13:20Z") == NOW
    assert parse_since("00:00", NOW) <= NOW
    with pytest.raises(ConfigError, match="ten minutes ago"):
        parse_since("soon")
