"""`tidewheel cluster` from up to down, as a user types it: groups, tokens, drains, a job whose connection is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tidewheel.cluster import background

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
LINES = 40
JOB = ("import os, time\nprint('cluster', os.environ['RAY_ADDRESS'])\n"
       f"for number in range({LINES}): print('line', number, flush=True); time.sleep(0.1)\n"
       "raise SystemExit(7)")


class Proxy:
    """Proxy of a TCP port. `cut` closes all connections and refuses new ones for a while."""

    def __init__(self, port: int) -> None:
        self._target, self._open, self._refusing = port, [], False
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        self._refusing = True
        for one in self._open:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close: a reset
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
            one.close()
        self._open.clear()
        time.sleep(seconds)
        self._refusing = False

    def _accept(self) -> None:
        while True:
            client, _ = self._server.accept()
            if self._refusing:
                client.close()
                continue
            upstream = socket.create_connection(("127.0.0.1", self._target))
            self._open += [client, upstream]
            for source, sink in ((client, upstream), (upstream, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return clean | {"TIDEWHEEL_STATE": str(tmp_path_factory.mktemp("state")), "PYTHONPATH": str(ROOT / "platform"),
                    "HOME": str(tmp_path_factory.mktemp("home"))}


def tidewheel(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tidewheel.cli", *words], env=environment, text=True, timeout=600,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def cluster(environment, tmp_path_factory):
    made = tidewheel(environment, "cluster", "up", "--nodes", "1", "--group", "gpu-spot:1:1,accelerator=1",
                     "--labels", "team=a")
    assert made.returncode == 0, made.stdout
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEWHEEL_STATE", environment["TIDEWHEEL_STATE"])
        state = background.find()
        assert state is not None
        yield state
        processes = background.ask(state, "processes", node_id=status(environment)["nodes"][0]["node_id"])["pids"]
        ended = tidewheel(environment, "cluster", "down")
        assert ended.returncode == 0, ended.stdout
        assert not [pid for pid in [state.supervisor, *processes] if alive(pid)]
        assert not Path(state.folder).exists()
        assert not list(Path(environment["TIDEWHEEL_STATE"]).iterdir())
        assert "no cluster 'local' is up" in tidewheel(environment, "cluster", "status").stdout
        assert not list(Path(environment["HOME"]).rglob("auth_token"))  # no copy of the token is elsewhere


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def status(environment: dict[str, str]) -> dict:
    return json.loads(tidewheel(environment, "cluster", "status", "--json").stdout)


def states(environment: dict[str, str], group: str) -> list[str]:
    return [node["state"] for node in status(environment)["nodes"] if node["group"] == group]


def test_a_job_is_followed_through_lost_connections(cluster, environment):
    proxy = Proxy(int(cluster.dashboard_url.rpartition(":")[2]))
    shown = dict(line.removeprefix("export ").split("=", 1) for line
                 in tidewheel(environment, "cluster", "env").stdout.splitlines())
    assert shown["RAY_ADDRESS"] == cluster.address
    following = subprocess.Popen(
        [sys.executable, "-m", "tidewheel.cli", "submit", "--address", f"http://127.0.0.1:{proxy.port}", "--id", "one",
         "--working-dir", "jobs", "--", "python", "-c", JOB], env={**environment, **shown}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    log = Path(cluster.folder, "ray/session_latest/logs/job-driver-one.log")
    for line in (5, 20):
        until = time.monotonic() + 600
        while not (log.exists() and f"line {line}\n" in log.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        proxy.cut(0.7)
    out, err = following.communicate(timeout=600)
    assert following.returncode == 7, err
    assert [int(number) for number in re.findall(r"^line (\d+)$", out, re.MULTILINE)] == list(range(LINES))
    assert "lost" in err or "does not answer" in err
    assert "evaluate.py" in err  # the list of uploaded files
    assert f"cluster {cluster.address}\n" in out  # this cluster, even if the machine runs others
    jobs = status(environment)["jobs"]
    assert [(job["id"], job["status"]) for job in jobs] == [("one", "FAILED")]


def test_without_the_token_nobody_gets_in(cluster, environment):
    stranger = {**environment, "TIDEWHEEL_STATE": environment["HOME"]}  # without the cluster's token
    refused = tidewheel(stranger, "job", "list", "--address", cluster.dashboard_url)
    assert refused.returncode == 2
    assert "token" in refused.stdout
    token = Path(cluster.token_path)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(cluster.folder).stat().st_mode) == 0o700
    secret = token.read_text()
    written = [*Path(environment["TIDEWHEEL_STATE"]).iterdir(), *Path(cluster.folder).rglob("*.log")]
    assert not [text for text in [refused.stdout, *(path.read_text(errors="replace") for path in written)]
                if secret in text]


def test_nodes_are_added_drained_and_killed(cluster, environment):
    labels = {node["group"]: node["labels"] for node in status(environment)["nodes"]}
    assert labels["data"] == {"ray.io/node-group": "data", "ray.io/market-type": "on-demand", "team": "a"}
    assert labels["gpu-spot"]["ray.io/market-type"] == "spot"
    assert "joined" in tidewheel(environment, "cluster", "add", "gpu-spot:1").stdout
    assert states(environment, "gpu-spot") == ["alive", "alive"]
    assert "ends in 1 s" in tidewheel(environment, "cluster", "drain", "gpu-spot", "--notice", "1").stdout
    killed = tidewheel(environment, "cluster", "kill", "data")
    assert "is gone, with" in killed.stdout
    until = time.monotonic() + 600
    while sorted(states(environment, "gpu-spot")) != ["alive", "dead"]:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert states(environment, "data") == ["dead"]
    wrong = tidewheel(environment, "cluster", "kill", "data")
    assert wrong.returncode == 2
    assert "`tidewheel cluster status` lists the ids" in wrong.stdout
    again = tidewheel(environment, "cluster", "up")
    assert again.returncode == 2
    assert "up already" in again.stdout
