"""Submit and follow jobs on a job server that fails in many ways: nothing is started or shown twice."""

from __future__ import annotations

import zipfile
from types import SimpleNamespace
from typing import Any

import pytest

from tidewheel.cluster.jobs import JobServer, Submission, _WrittenLog, command_of, exit_code
from tidewheel.errors import ClusterError, ConfigError


@pytest.mark.parametrize(("tokens", "command"), [
    (["train", "--config", "a b.yaml"], "python -m jobs.train --config 'a b.yaml'"),
    (["jobs.prepare_data", "--x"], "python -m jobs.prepare_data --x"),
    (["pipelines/demo.yaml", "--output", "o"],
     "python -m jobs.prepare_data --config pipelines/demo.yaml --output o"),
    (["jobs/configs/demo.yaml"], "python -m jobs.train --config jobs/configs/demo.yaml"),
    (["my flow.py", "now"], "python 'my flow.py' now"),
    (["echo", "a;b"], "echo 'a;b'"),
])
def test_tokens_become_a_command(tokens, command):
    assert command_of(tokens) == command


@pytest.mark.parametrize(("tokens", "command"), [
    (["train", "--config", "a.yaml"], "python -m tidewheel.cli train --config a.yaml"),
    (["jobs.prepare_data", "--x"], "python -m tidewheel.cli data run --x"),
    (["export", "runs/a"], "python -m tidewheel.cli checkpoint export runs/a"),
    (["workflow", "--flow", "f"], "python -m tidewheel.cli workflow run --flow f")])
def test_without_a_checkout_commands_use_the_package(tmp_path, tokens, command):
    assert command_of(tokens, str(tmp_path)) == command
    assert command_of(tokens, "") == command


@pytest.mark.parametrize("tokens", [[], ["nowhere.yaml"]])
def test_unknown_commands_are_refused(tokens):
    with pytest.raises(ConfigError):
        command_of(tokens)


class Server:
    """A failing job server: `away` requests fail each time, and log streams break after `breaks` characters."""

    def __init__(self, log: str = "", breaks: tuple[int, ...] = (), away: int = 0, **info: Any) -> None:
        self.log, self.breaks, self.away, self.left = log, list(breaks), away, away
        self.details = {"status": "SUCCEEDED", "driver_exit_code": None, **info}
        self.started: list[str] = []
        self.lose_answer = False

    def _request(self) -> None:
        if self.left:
            self.left -= 1
            raise ConnectionError("refused")
        self.left = self.away

    def submit_job(self, submission_id: str, **_: Any) -> str:
        self._request()
        if submission_id in self.started:
            raise RuntimeError(f"Job with submission_id {submission_id} already exists")
        self.started.append(submission_id)
        if self.lose_answer:
            self.lose_answer = False
            raise ConnectionError("reset")
        return submission_id

    def get_job_info(self, job: str) -> Any:
        self._request()
        running = {**self.details, "status": "RUNNING"} if self.breaks else self.details
        return SimpleNamespace(**running)

    def get_job_logs(self, job: str) -> str:
        self._request()
        return self.log

    async def tail_job_logs(self, job: str):
        end = self.breaks.pop(0) if self.breaks else len(self.log)
        for start in range(0, end, 3):
            yield self.log[start:min(start + 3, end)]
        if end < len(self.log):
            raise RuntimeError("WebSocket connection closed unexpectedly")


def connected(server: Server, monkeypatch, **options: Any) -> JobServer:
    import ray.job_submission

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", lambda address: server)
    monkeypatch.setattr("tidewheel.cluster.jobs.POLL_SECONDS", 0.0)
    monkeypatch.setattr("tidewheel.cluster.jobs.time.sleep", lambda seconds: None)
    return JobServer("http://there:1", **options)


def test_the_log_is_written_once_through_lost_connections(monkeypatch):
    log = "".join(f"line {index}\n" for index in range(50))
    messages: list[str] = []
    server = Server(log, breaks=(10, 100, 7, 399), away=2, status="FAILED", driver_exit_code=7)
    written: list[str] = []
    assert connected(server, monkeypatch, say=messages.append).follow("job", written.append) == 7
    assert "".join(written) == log
    assert any("lost" in text for text in messages)


@pytest.mark.parametrize(("info", "code"), [
    ({"status": "SUCCEEDED"}, 0), ({"status": "STOPPED"}, 143), ({"status": "FAILED", "driver_exit_code": 2}, 2),
    ({"status": "FAILED"}, 1)])
def test_a_job_status_becomes_an_exit_code(info, code):
    assert exit_code(SimpleNamespace(**{"driver_exit_code": None, **info})) == code


def test_a_lost_answer_does_not_start_the_job_twice(monkeypatch):
    server = Server()
    server.lose_answer = True
    assert connected(server, monkeypatch, say=print).submit(Submission("x", "")) == server.started[0]
    assert len(server.started) == 1


def test_an_id_of_the_user_that_is_taken_is_an_error(monkeypatch):
    server = Server()
    server.started.append("mine")
    with pytest.raises(ClusterError, match="already exists"):
        connected(server, monkeypatch).submit(Submission("x", "", id="mine"))


def test_a_server_that_stays_away_is_an_error(monkeypatch):
    server = Server(away=10**9)
    with pytest.raises(ClusterError, match="not answered for 0 s"):
        connected(server, monkeypatch, patience_seconds=0, say=print).info("job")


def test_a_missing_server_is_an_error(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterError, match="no job server answers"):
        JobServer("http://127.0.0.1:9")


def test_overlapping_parts_of_a_log_are_shown_once():
    out: list[str] = []
    written = _WrittenLog(out.append)
    written.part("abc", 0)
    written.part("abcd", 0)
    written.part("cde", 2)
    written.from_start("abcdefg")
    assert "".join(out) == "abcdefg"


def test_the_upload_matches_the_listing_and_reports_left_out_secrets(monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text("pass")
    (tmp_path / ".env").write_text("KEY=secret")
    messages: list[str] = []
    packages: list[list[str]] = []

    def submit_job(**arguments: Any) -> str:
        with zipfile.ZipFile(arguments["runtime_env"]["working_dir"]) as package:
            packages.append(package.namelist())
        return str(arguments["submission_id"])

    server = Server()
    server.submit_job = submit_job
    connected(server, monkeypatch, say=messages.append).submit(Submission("x", str(tmp_path)))
    assert packages == [["train.py"]]
    assert messages == ["left out 1 file that may hold secrets: .env (by its name); --include PATTERN uploads them"]
