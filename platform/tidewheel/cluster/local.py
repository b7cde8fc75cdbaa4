"""A Ray cluster of several nodes on this machine: a head and workers as separate raylets on loopback.

    with LocalCluster(nodes=2) as cluster:
        ray.init(address=cluster.address)
        cluster.kill_node(cluster.nodes[0])

Each node has its own raylet, object store and worker processes, and dies as a machine does. Several clusters may run
side by side; none joins or stops another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tidewheel.cluster.autoscaling import AutoscaledGroup
from tidewheel.cluster.groups import Group
from tidewheel.cluster.private_run import run_folder
from tidewheel.errors import ClusterError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class NodeHandle:
    """One worker node: Ray's node id (56 hex digits) and the process id of its raylet."""

    node_id: str
    pid: int


class LocalCluster:
    """Context manager around one cluster, which ends with the block or with the process, however that ends.

    The cluster's processes inherit the environment that this process has when the block is entered.

    Args:
        nodes: worker nodes at the start.
        cpus_per_node: CPUs that each worker node offers; the machine need not have them.
        head_cpus: CPUs that the head offers; 0 keeps tasks and training off it, so that only worker nodes can be lost.
        dashboard: start the dashboard and job server, at `dashboard_url`.
        object_store_mb: shared memory per node, in MiB; Ray's minimum is 75.
        autoscaled: groups of nodes that Ray's autoscaler starts when work asks for them, and ends when they are idle.
        idle_seconds: time after which an idle node of such a group ends.

    Attributes:
        address: "127.0.0.2:PORT", for `ray.init`.
        dashboard_url: "http://127.0.0.1:PORT", or "".
        client_environment: variables that other programs, such as `ray job submit`, need to authenticate.

    Raises:
        ClusterError: Ray's processes do not start when the block is entered.
    """

    def __init__(self, nodes: int, cpus_per_node: float = 1, *, head_cpus: float = 0, dashboard: bool = False,
                 object_store_mb: int = 128, autoscaled: Sequence[AutoscaledGroup] = (),
                 idle_seconds: float = 10.0) -> None:
        self._count = nodes
        self._cpus = cpus_per_node
        self._head_cpus = head_cpus
        self._store_bytes = object_store_mb << 20
        self._dashboard = dashboard
        self._autoscaled = tuple(autoscaled)
        self._idle_seconds = idle_seconds
        self._folder: Path | None = None
        self._supervisor: subprocess.Popen[str] | None = None
        self._nodes: list[NodeHandle] = []
        self._lock = threading.RLock()
        self.address = ""
        self.dashboard_url = ""
        self.client_environment: dict[str, str] = {}

    def __enter__(self) -> LocalCluster:
        atexit.register(self.close)
        try:
            self._folder = run_folder()
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "tidewheel.cluster.supervisor", str(self._folder)], text=True,
                env=supervisor_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True)  # Ctrl-C is for this process; the supervisor ends when its pipe closes
            port = free_port() if self._dashboard else 0
            head = self._ask("start", cpus=self._head_cpus, object_store_bytes=self._store_bytes, dashboard_port=port,
                             autoscaled=bool(self._autoscaled))
            if self._autoscaled:
                self._ask("autoscale", groups=[group.described(self._store_bytes) for group in self._autoscaled],
                          idle_seconds=self._idle_seconds)
            self.address = head["address"]
            # The cluster asks for a token if and only if this process, its first client, shows one.
            self.client_environment = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}
            self.dashboard_url = f"http://{LOOPBACK}:{port}" if port else ""
            for _ in range(self._count):
                self.add_node()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    @property
    def nodes(self) -> list[NodeHandle]:
        """Worker nodes that are up, oldest first."""
        return list(self._nodes)

    def add_node(self, cpus: float | None = None, *, group: Group | None = None) -> NodeHandle:
        """Start one more worker node; return when the cluster's table has it. Any thread may call it.

        Args:
            cpus: CPUs that the node offers; None for those of `group`, or those of the nodes at the start.
            group: CPUs, labels and resources of the node.

        Raises:
            ClusterError: Ray's processes do not start.
        """
        offer: dict[str, Any] = {"cpus": self._cpus}
        if group is not None:
            offer = {"cpus": group.cpus, "labels": group.node_labels, "resources": group.resources}
        if cpus is not None:
            offer["cpus"] = cpus
        answer = self._ask("add", object_store_bytes=self._store_bytes, **offer)
        node = NodeHandle(answer["node_id"], answer["pid"])
        self._nodes.append(node)
        return node

    def kill_node(self, node: NodeHandle) -> list[int]:
        """Kill a node's raylet and all its processes, as a power cut does; return their process ids.

        Raises:
            ClusterError: the node does not belong to this cluster, or has ended.
        """
        if node not in self._nodes:
            raise ClusterError("no such worker node in this cluster", where=node.node_id[:12],
                               fix="take one from `nodes`")
        self._nodes.remove(node)
        return self._ask("kill", node_id=node.node_id)["killed"]

    def processes(self, node: NodeHandle) -> list[int]:
        """Return the process ids of a node: its raylet, then agents and workers."""
        return self._ask("processes", node_id=node.node_id)["pids"]

    def close(self) -> None:
        """End every process of the cluster and remove its temporary folder. It may be called again."""
        atexit.unregister(self.close)
        supervisor = self._supervisor
        self._supervisor = None
        self._nodes = []
        if supervisor is None:
            return
        with contextlib.suppress(OSError):
            supervisor.stdin.close()  # type: ignore[union-attr]
        try:
            supervisor.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.kill(supervisor.pid, signal.SIGKILL)  # the kernel ends the raylets with it
            supervisor.wait()
        if supervisor.stdout is not None:
            supervisor.stdout.close()
        shutil.rmtree(str(self._folder), ignore_errors=True)

    def _ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        supervisor = self._supervisor
        if supervisor is None or supervisor.stdin is None or supervisor.stdout is None:
            raise ClusterError("the local cluster is not running", where="LocalCluster",
                               fix="use it inside its `with` block")
        with self._lock:
            try:
                supervisor.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
                supervisor.stdin.flush()
                line = supervisor.stdout.readline()
            except (OSError, ValueError):
                line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its supervisor process ended"}
        if "error" in answer:
            raise ClusterError(f"the local cluster could not {what}: {answer['error']}", where=self._logs(),
                               fix="see the logs there; free memory and space in /tmp, then try again")
        return answer["ok"]

    def _logs(self) -> str:
        """Copy the logs, which are removed with the cluster, so that they can explain a failure; return the copy."""
        kept = Path(f"{self._folder}-logs")
        with contextlib.suppress(OSError):
            shutil.copytree(str(self._folder), kept, dirs_exist_ok=True, symlinks=True,
                            ignore=lambda folder, names: [n for n in names if not _is_log(Path(folder, n))])
        return str(kept)


def _is_log(path: Path) -> bool:
    return (path.is_dir() and not path.is_symlink()) or path.suffix in (".log", ".out", ".err")


def supervisor_environment() -> dict[str, str]:
    """Return this process's environment without the variables that would connect a cluster to another one."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_JOB_ID")}
    package_root = str(Path(__file__).resolve().parents[2])
    paths = [package_root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    # `python` in a job's entrypoint is the interpreter that has Tidewheel.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return environment


def free_port() -> int:
    """Return a TCP port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
