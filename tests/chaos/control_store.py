"""Kill the control store (GCS) of a `LocalCluster` and start it again, as KubeRay does with the head's container.

The new process finds the cluster's tables in a server that speaks Redis's protocol. `redis_server` starts one; the
program `redis-server` must be installed (`apt-get install redis-server`), or named by the variable REDIS_SERVER.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tidewheel.cluster.local import LOOPBACK, LocalCluster, free_port

REDIS_SERVER = os.environ.get("REDIS_SERVER") or shutil.which("redis-server")
"""The program; None if it is not installed."""
START_SECONDS = 60.0


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Redis server that writes each change to its disk, as the Kubernetes component `redis` does.

    Yield the variable by which Ray's head finds it; KubeRay sets the same one. The password of the component is left
    out, because Ray takes it as an option of `ray start`, and only loopback reaches this server.

    Args:
        folder: where it writes.
    """
    assert REDIS_SERVER is not None
    port = free_port()
    with open(folder / "redis.log", "w") as log:
        process = subprocess.Popen(
            [REDIS_SERVER, "--bind", LOOPBACK, "--port", str(port), "--dir", str(folder), "--appendonly", "yes"],
            stdout=log, stderr=log)
    try:
        wait_for_port(LOOPBACK, port)
        yield {"RAY_REDIS_ADDRESS": f"{LOOPBACK}:{port}"}
    finally:
        process.kill()
        process.wait()


class ControlStore:
    """The control store of a cluster.

    Args:
        cluster: its cluster.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        assert cluster._supervisor is not None
        [self._process] = [child for child in psutil.Process(cluster._supervisor.pid).children()
                           if "gcs_server" in Path(child.exe()).name]
        self._host, port = cluster.address.rsplit(":", 1)
        self._port = int(port)
        kept = [word for word in self._process.cmdline() if not word.startswith("--gcs_server_port=")]
        self._command = [*kept, f"--gcs_server_port={port}"]
        self._environment = self._process.environ()
        self._started: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """Send SIGKILL, and wait until nothing listens any more."""
        if self._started is not None:
            self._started.kill()
            self._started.wait()
        else:
            self._process.kill()
        until = time.monotonic() + START_SECONDS
        while self.listens():
            assert time.monotonic() < until
            time.sleep(0.01)

    def start(self) -> None:
        """Start it again at its address, and return when it listens."""
        self._started = subprocess.Popen(self._command, env=self._environment, stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL)
        wait_for_port(self._host, self._port)

    def listens(self) -> bool:
        """Return whether a process listens at the cluster's address."""
        return _listens(self._host, self._port)

    def close(self) -> None:
        """End the process that `start` started; that of the cluster ends with it."""
        if self._started is not None:
            self._started.kill()
            self._started.wait()


def wait_for_port(host: str, port: int) -> None:
    """Wait until a process listens at a port."""
    until = time.monotonic() + START_SECONDS
    while not _listens(host, port):
        assert time.monotonic() < until, f"nothing listens at {host}:{port}"
        time.sleep(0.01)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
