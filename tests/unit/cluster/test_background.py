"""State files of background clusters and requests to their supervisors; a socket server acts as the supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tidewheel.cluster import background
from tidewheel.cluster.background import State, ask, down, find, find_address, node_of, show_token
from tidewheel.errors import ClusterError, ConfigError

NODES = [{"node_id": "aa1", "group": "data", "state": "alive", "head": False},
         {"node_id": "ab2", "group": "spot", "state": "alive", "head": False},
         {"node_id": "ab3", "group": "spot", "state": "draining", "head": False},
         {"node_id": "ac4", "group": "spot", "state": "dead", "head": False},
         {"node_id": "ad5", "group": "head", "state": "alive", "head": True}]


class Server:
    """A supervisor that gives prepared answers."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {"status": {"ok": {"nodes": NODES, "jobs": []}}, "stop": {"ok": {"killed": [1]}}}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(f"{folder}/supervisor.sock")
        self._server.listen(8)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                with connection, connection.makefile("rw") as stream:
                    if not (line := stream.readline()):
                        continue
                    request = json.loads(line)
                    self.requests.append(request)
                    stream.write(json.dumps(self.answers[request["do"]]) + "\n")
                    stream.flush()
                    if request["do"] == "stop":
                        self._server.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with a short name, since socket paths are limited; state files are below `tmp_path`."""
    monkeypatch.setenv("TIDEWHEEL_STATE", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    path = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    running = Server(folder)
    yield running
    running.close()


def state_of(folder: Path, pid: int = 1 << 22) -> State:
    return State("local", str(folder), pid, "127.0.0.2:6379", "http://127.0.0.1:8265", 0.0)


def write(tmp_path: Path, values: dict[str, Any]) -> Path:
    path = tmp_path / "state/local.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.usefixtures("server")
def test_a_cluster_is_found_by_name_and_by_its_addresses(folder: Path, tmp_path: Path):
    state = state_of(folder)
    write(tmp_path, asdict(state))
    assert find() == state
    assert find_address("127.0.0.2:6379") == state
    assert find_address("http://127.0.0.1:8265/") == state
    assert find_address("127.0.0.2:1") is None
    assert find("other") is None


@pytest.mark.usefixtures("server")
def test_the_state_file_of_an_older_release_is_read(folder: Path, tmp_path: Path):
    values = asdict(state_of(folder))
    values["keeper"] = values.pop("supervisor")
    write(tmp_path, values)
    assert find() == state_of(folder)


def test_the_file_and_folder_of_a_dead_supervisor_are_removed(folder: Path, tmp_path: Path):
    path = write(tmp_path, asdict(state_of(folder)))
    assert find() is None
    assert not path.exists()
    assert not folder.exists()


def test_a_damaged_state_file_is_an_error_that_names_it(folder: Path, tmp_path: Path):
    path = write(tmp_path, {"name": "local"})
    with pytest.raises(ClusterError, match="not a state file") as raised:
        find()
    assert raised.value.where == str(path)
    with pytest.raises(ConfigError, match="no name for a cluster"):
        find("../other")


def test_a_node_is_named_by_a_prefix_of_its_id_or_by_its_group(folder: Path, server: Server):
    state = state_of(folder)
    assert node_of(state, "aa")["node_id"] == "aa1"
    assert node_of(state, "spot")["node_id"] == "ab3", "the newest node of the group that is not dead"
    for prefix, count in (("ab", "2"), ("ac", "no"), ("ad", "no"), ("", "no")):
        with pytest.raises(ConfigError, match=f"{count} worker nodes begin with '{prefix}'"):
            node_of(state, prefix)
    assert {request["do"] for request in server.requests} == {"status"}


def test_a_failed_request_keeps_the_logs(folder: Path, server: Server):
    server.answers["add"] = {"error": "OSError: no memory"}
    (folder / "supervisor.log").write_text("why")
    (folder / "token").write_text("secret")
    with pytest.raises(ClusterError, match="could not add: OSError: no memory") as raised:
        ask(state_of(folder), "add", cpus=1)
    assert server.requests == [{"do": "add", "cpus": 1}]
    logs = Path(str(raised.value.where))
    try:
        assert (logs / "supervisor.log").read_text() == "why"
        assert not (logs / "token").exists()
    finally:
        shutil.rmtree(logs)


def test_a_supervisor_that_is_gone_is_an_error(folder: Path):
    with pytest.raises(ClusterError, match="supervisor does not answer"):
        ask(state_of(folder), "status")


@pytest.mark.usefixtures("server")
def test_down_removes_the_folder_and_the_state_file(folder: Path, tmp_path: Path):
    path = write(tmp_path, asdict(state_of(folder)))
    assert down(state_of(folder)) == 2
    assert not path.exists()
    assert not folder.exists()


@pytest.mark.usefixtures("server")
def test_the_token_is_shown_only_where_the_environment_does_not_decide(folder: Path, tmp_path: Path, monkeypatch):
    write(tmp_path, asdict(state_of(folder)))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "")  # the end of the test then removes the variable that is set below
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    show_token(None)
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    monkeypatch.delenv("RAY_AUTH_MODE")
    show_token("127.0.0.2:1")
    assert "RAY_AUTH_MODE" not in os.environ
    show_token("127.0.0.2:6379")
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == f"{folder}/token"


def test_state_files_are_below_the_users_state_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("TIDEWHEEL_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert background.state_folder() == tmp_path / "tidewheel/clusters"
