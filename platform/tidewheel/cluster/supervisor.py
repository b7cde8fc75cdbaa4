"""The supervisor: the process that owns the nodes of a local cluster.

`LocalCluster` starts it and talks to it over its standard streams; a background cluster uses a socket (`background`).
Each request is a line of JSON, and so is each answer.

It is a process of its own so that the cluster always ends with its owner. If the owner ends, even by SIGKILL, the pipe
closes and the supervisor ends every process of the cluster. If the supervisor is killed too, the kernel ends the
raylets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.cluster.few_processes import no_idle_api_server
from tidewheel.cluster.patient_start import patient_start
from tidewheel.cluster.session import KEEP_WORKERS

#: A killed raylet refuses connections at once, so three probes 0.4 s apart are enough. A raylet that is only starved of
#: CPU has three times 3 s before it counts as dead.
FAST_DETECTION = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 400,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
#: Each node has a loopback address of its own, from 127.0.0.2 up, as ranks are grouped by address. `ray.init` takes
#: 127.0.0.1 for the outside address of the machine. Systems other than Linux have only one loopback address.
MANY_LOOPBACKS = sys.platform == "linux"


class Supervisor:
    """Head and worker nodes as child processes.

    Args:
        temp_dir: folder of Ray's sessions.
    """

    def __init__(self, temp_dir: str) -> None:
        self.temp_dir = temp_dir
        self.head: Any = None
        self.nodes: dict[str, Any] = {}
        self._started = 0

    def start(self, *, cpus: float, object_store_bytes: int, dashboard_port: int,
              labels: Mapping[str, str] | None = None, autoscaled: bool = False) -> dict[str, Any]:
        """Start the head; return its id, process id and the cluster's address.

        Args:
            cpus: CPUs that the head offers.
            object_store_bytes: shared memory of the head.
            dashboard_port: port of the dashboard and job server; 0 for none.
            labels: Ray's node labels.
            autoscaled: `autoscale` will be called.
        """
        from tidewheel.cluster.autoscaling import HEAD_ENVIRONMENT

        self.head = self._node(head=True, cpus=cpus, object_store_bytes=object_store_bytes,
                               include_dashboard=bool(dashboard_port), dashboard_port=dashboard_port or None,
                               include_log_monitor=bool(dashboard_port), no_monitor=True, labels=dict(labels or {}),
                               env_vars=HEAD_ENVIRONMENT if autoscaled else None,
                               _system_config={**FAST_DETECTION, **KEEP_WORKERS, "enable_autoscaler_v2": autoscaled})
        from ray._private.utils import write_ray_address

        # Ray's job server reads the address for its jobs there; without the file it picks any cluster of this machine
        write_ray_address(self.head.gcs_address, self.temp_dir)
        return {"address": self.head.gcs_address, **self._described(self.head)}

    def autoscale(self, *, groups: Sequence[Mapping[str, Any]], idle_seconds: float) -> dict[str, Any]:
        """Let Ray's autoscaler (v2) start and end the nodes of groups on this machine.

        Args:
            groups: each with "name", the numbers of nodes "least" and "most", and a node's "resources" and "labels".
            idle_seconds: time after which an unused node ends.
        """
        from tidewheel.cluster.autoscaling import ENVIRONMENT, autoscaler_config

        config = autoscaler_config(self.head.gcs_address, self.temp_dir, groups, idle_seconds)
        path = f"{self.temp_dir}/autoscaler.json"
        with open(path, "w") as file:
            json.dump(config, file)
        os.environ.update(ENVIRONMENT)
        self.head._ray_params.autoscaling_config = path
        self.head.start_monitor()
        return {"config": path}

    def add(self, *, cpus: float, object_store_bytes: int, labels: Mapping[str, str] | None = None,
            resources: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Start one worker node and wait until the cluster's table has it.

        Args:
            cpus: CPUs that the node offers.
            object_store_bytes: shared memory of the node.
            labels: Ray's node labels.
            resources: custom resources, by name.
        """
        node = self._node(head=False, cpus=cpus, object_store_bytes=object_store_bytes, include_log_monitor=False,
                          gcs_address=self.head.gcs_address, labels=dict(labels or {}),
                          resources=dict(resources or {}))
        self.nodes[node.node_id] = node
        return self._described(node)

    def kill(self, *, node_id: str) -> dict[str, Any]:
        """Kill a node's raylet and every process below it with SIGKILL."""
        node = self.nodes.pop(node_id)
        return {"killed": _kill(self._tree(node))}

    def processes(self, *, node_id: str) -> dict[str, Any]:
        """Return the process ids of a node, its raylet first."""
        node = self.head if node_id == self.head.node_id else self.nodes[node_id]
        return {"pids": [process.pid for process in self._tree(node)]}

    def stop(self) -> dict[str, Any]:
        """End every process that was started here and remove the temporary folder."""
        import psutil

        children = psutil.Process().children(recursive=True)
        for process in children:  # freeze first, so that a dying raylet cannot start one more worker
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        children = list({*children, *psutil.Process().children(recursive=True)})
        killed = _kill(children)
        shutil.rmtree(self.temp_dir, ignore_errors=True)
        return {"killed": killed}

    def _node(self, *, head: bool, cpus: Any, object_store_bytes: int, **more: Any) -> Any:
        from ray._private import services
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        self._started += 1
        address = f"127.0.{self._started // 250}.{self._started % 250 + 1}" if MANY_LOOPBACKS else None
        parameters = RayParams(num_cpus=cpus, num_gpus=0, object_store_memory=object_store_bytes, min_worker_port=0,
                               max_worker_port=0, node_ip_address=address, temp_dir=self.temp_dir,
                               dashboard_agent_listen_port=0, runtime_env_dir_name=f"runtime_{self._started}", **more)
        # Each node has its own folder for jobs' code: a node that unpacks it again would remove the driver's copy.
        # `stop` ends the children, not an exit hook. With `spawn_reaper` they also end when this process is killed.
        with no_idle_api_server(), patient_start():
            node = Node(parameters, head=head, shutdown_at_exit=False, spawn_reaper=True)
        services.wait_for_node(node.gcs_address, node.plasma_store_socket_name, 60)
        return node

    def _described(self, node: Any) -> dict[str, Any]:
        return {"node_id": node.node_id, "pid": self._raylet(node).pid}

    def _raylet(self, node: Any) -> Any:
        return node.all_processes["raylet"][0].process

    def _tree(self, node: Any) -> list[Any]:
        import psutil

        try:
            raylet = psutil.Process(self._raylet(node).pid)
            return [raylet, *raylet.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


class BackgroundSupervisor(Supervisor):
    """A supervisor that every process of this user may ask, and that ends drained nodes at their deadline."""

    def __init__(self, temp_dir: str) -> None:
        super().__init__(temp_dir)
        self.stopped = False
        self._lock = threading.RLock()
        self._accessor: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request; return {"ok": its result} or {"error": a message}."""
        name = request.pop("do", "")
        if name not in ("start", "add", "kill", "processes", "drain", "status", "stop"):
            return {"error": f"no such request: {name!r}"}
        try:
            with self._lock:
                answer = {"ok": getattr(self, name)(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.stopped = self.stopped or name == "stop"
        return answer

    def drain(self, *, node_id: str, notice_seconds: float, reason: str) -> dict[str, Any]:
        """Drain a node, as a spot reclaim does, and end it when the notice is over.

        Args:
            node_id: id of the node.
            notice_seconds: time between the notice and the end.
            reason: text for the workers' logs.
        """
        from tidewheel.cluster.faults import drain_node

        accepted = drain_node(self.head.gcs_address, node_id, notice_seconds, reason)
        if accepted:
            timer = threading.Timer(notice_seconds, self._end, [node_id])
            timer.daemon = True
            timer.start()
        return {"accepted": accepted}

    def _end(self, node_id: str) -> None:
        with self._lock:
            if node_id in self.nodes and not self.stopped:
                self.kill(node_id=node_id)

    def status(self) -> dict[str, Any]:
        """Return every node of the cluster's table and its jobs, newest last."""
        return {"nodes": self._table(), "jobs": self._jobs()}

    def _table(self) -> list[dict[str, Any]]:
        from tidewheel.placement import GROUP_LABEL

        draining = self._state().get_draining_nodes()
        rows = []
        for row in self._state().node_table():
            node_id = row["NodeID"]
            labels = row.get("Labels") or {}
            resources = row.get("Resources") or {}
            is_head = node_id == self.head.node_id
            alive = row["Alive"] and (node_id in self.nodes or is_head)  # the table learns of a kill later
            deadline_ms = draining.get(node_id) if alive else None
            state = "dead"
            if alive:
                state = "alive" if deadline_ms is None else "draining"
            rows.append({
                "node_id": node_id, "head": is_head, "group": labels.get(GROUP_LABEL, ""),
                "labels": {key: value for key, value in labels.items() if key != "ray.io/node-id"},
                "host": row["NodeManagerAddress"], "cpus": resources.get("CPU", 0.0),
                "resources": {name: amount for name, amount in resources.items() if ":" not in name and name not in (
                    "CPU", "memory", "object_store_memory")},
                "state": state,
                "seconds_left": None if deadline_ms is None else max(0.0, deadline_ms / 1000 - time.time())})
        return rows

    def _state(self) -> Any:
        if self._accessor is None:
            from ray._private.state import GlobalState
            from ray._raylet import GcsClientOptions  # type: ignore[attr-defined]

            self._accessor = GlobalState()
            self._accessor._initialize_global_state(GcsClientOptions.create(
                self.head.gcs_address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False))
        return self._accessor

    def _jobs(self) -> list[dict[str, Any]]:
        from ray.job_submission import JobSubmissionClient

        if not self.head.webui_url:
            return []
        jobs = JobSubmissionClient(f"http://{self.head.webui_url}").list_jobs()
        return [{"id": job.submission_id or job.job_id, "status": str(job.status.value), "entrypoint": job.entrypoint,
                 "started": (job.start_time or 0) / 1000, "ended": (job.end_time or 0) / 1000}
                for job in sorted(jobs, key=lambda job: job.start_time or 0) if str(job.type.value) == "SUBMISSION"]


def _kill(processes: list[Any]) -> list[int]:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil compares start times, so it spares a reused id
            process.kill()
    until = time.monotonic() + 5
    while any(map(_exists, processes)) and time.monotonic() < until:
        time.sleep(0.02)
    return [process.pid for process in processes]


def _exists(process: Any) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    """Serve requests until standard input closes, then end the cluster."""
    answers = os.fdopen(os.dup(1), "w")
    folder = sys.argv[1]
    log = os.open(f"{folder}/supervisor.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)  # only answers may reach the pipe
    os.dup2(log, 2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    supervisor = Supervisor(f"{folder}/ray")  # Ray's folder is open to everyone; the one around it is not
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"ok": getattr(supervisor, request.pop("do"))(**request)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    except BrokenPipeError:
        sys.stderr.write("the owner is gone\n")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        import ray  # noqa: F401  it brings psutil and puts it on the path

        supervisor.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    import ray  # noqa: F401  while the owner prepares its first request

    main()
