"""The supervisor of a local cluster's nodes: its requests, its table and its end, without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray  # noqa: F401  provides psutil, which the supervisor imports

from tidewheel.cluster import background
from tidewheel.cluster.local import supervisor_environment
from tidewheel.cluster.supervisor import BackgroundSupervisor, Supervisor


class Cluster:
    """A supervisor with a prepared table, whose head and one worker node are sleeping processes."""

    def __init__(self, folder: Path) -> None:
        self.supervisor = BackgroundSupervisor(str(folder))
        self.processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
        self.supervisor.head, node = (self.node(name, process) for name, process in zip(
            ("head", "worker"), self.processes, strict=True))
        self.supervisor.nodes = {"worker": node}
        self.rows = [self.row("head", "127.0.0.2"), self.row("worker", "127.0.0.3")]
        self.draining: dict[str, int] = {}
        self.supervisor._accessor = SimpleNamespace(node_table=lambda: self.rows,
                                                    get_draining_nodes=lambda: self.draining)

    @staticmethod
    def node(name: str, process: subprocess.Popen[bytes]) -> SimpleNamespace:
        return SimpleNamespace(node_id=name, webui_url="", all_processes={"raylet": [SimpleNamespace(process=process)]})

    @staticmethod
    def row(name: str, host: str) -> dict[str, object]:
        labels = {"ray.io/node-id": name, "ray.io/node-group": "gpu", "team": "a"}
        resources = {"CPU": 2.0, "memory": 1e9, f"node:{host}": 1.0, "accelerator": 8.0}
        return {"NodeID": name, "Alive": True, "Labels": labels, "Resources": resources, "NodeManagerAddress": host}


@pytest.fixture
def cluster(tmp_path: Path):
    running = Cluster(tmp_path / "ray")
    yield running
    for process in running.processes:
        process.kill()
        process.wait()


def test_a_request_that_is_unknown_or_fails_is_answered_with_an_error(cluster: Cluster):
    assert cluster.supervisor.answer({"do": "_kill"}) == {"error": "no such request: '_kill'"}
    assert cluster.supervisor.answer({}) == {"error": "no such request: ''"}
    assert cluster.supervisor.answer({"do": "kill", "node_id": "other"}) == {"error": "KeyError: 'other'"}
    assert not cluster.supervisor.stopped


def test_the_table_has_groups_resources_and_states(cluster: Cluster):
    cluster.draining["worker"] = int((time.time() + 60) * 1000)
    head, worker = cluster.supervisor.answer({"do": "status"})["ok"]["nodes"]
    assert (head["head"], head["state"], head["seconds_left"]) == (True, "alive", None)
    assert (worker["group"], worker["cpus"], worker["resources"]) == ("gpu", 2.0, {"accelerator": 8.0})
    assert worker["labels"] == {"ray.io/node-group": "gpu", "team": "a"}
    assert worker["state"] == "draining"
    assert 50 < worker["seconds_left"] <= 60


def test_a_killed_node_is_dead_in_the_table_before_ray_has_noticed(cluster: Cluster):
    pid = cluster.processes[1].pid
    assert cluster.supervisor.answer({"do": "processes", "node_id": "worker"}) == {"ok": {"pids": [pid]}}
    assert cluster.supervisor.answer({"do": "kill", "node_id": "worker"}) == {"ok": {"killed": [pid]}}
    assert cluster.processes[1].wait(timeout=60) < 0
    assert [row["state"] for row in cluster.supervisor.status()["nodes"]] == ["alive", "dead"]
    assert cluster.processes[0].poll() is None


def test_a_drained_node_ends_at_its_deadline_unless_the_cluster_has_ended(cluster: Cluster, monkeypatch):
    notices: list[tuple[str, float, str]] = []
    monkeypatch.setattr("tidewheel.cluster.faults.drain_node",
                        lambda address, *notice: notices.append(notice) is None)
    cluster.supervisor.head.gcs_address = "127.0.0.2:1"
    request = {"do": "drain", "node_id": "worker", "notice_seconds": 0.05, "reason": "reclaim"}
    assert cluster.supervisor.answer(request) == {"ok": {"accepted": True}}
    assert notices == [("worker", 0.05, "reclaim")]
    assert cluster.processes[1].wait(timeout=60) < 0
    cluster.supervisor.nodes["late"] = cluster.supervisor.head
    cluster.supervisor.stopped = True
    cluster.supervisor._end("late")
    assert cluster.processes[0].poll() is None


def test_stop_ends_grandchildren_too_and_removes_the_folder(tmp_path: Path):
    script = ("import subprocess, sys\n"
              "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
              "print(child.pid, flush=True)\nchild.wait()\n")
    code = ("import subprocess, sys\nimport ray\nfrom tidewheel.cluster.supervisor import Supervisor\n"
            f"child = subprocess.Popen([sys.executable, '-c', {script!r}], stdout=subprocess.PIPE, text=True)\n"
            "grandchild = int(child.stdout.readline())\n"
            f"killed = Supervisor({str(tmp_path / 'ray')!r}).stop()['killed']\n"
            "print(child.pid, grandchild, *killed)\n")
    (tmp_path / "ray").mkdir()
    process = subprocess.run([sys.executable, "-c", code], env=supervisor_environment(), text=True, capture_output=True,
                          timeout=120, check=True)
    child, grandchild, *killed = map(int, process.stdout.split())
    assert {child, grandchild} <= set(killed)
    assert not background._lives(grandchild)
    assert not (tmp_path / "ray").exists()


def test_the_process_answers_by_line_and_ends_with_its_pipe(tmp_path: Path):
    folder = tmp_path / "cluster"
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-m", "tidewheel.cluster.supervisor", str(folder)], text=True,
                               env=supervisor_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    for request in ({"do": "kill", "node_id": "x"}, {"do": "add"}):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        assert "Error" in json.loads(process.stdout.readline())["error"]
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    process.stdout.close()
    assert not folder.exists()


def test_an_ended_node_has_no_processes():
    node = SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=SimpleNamespace(pid=_unused_pid()))]})
    assert Supervisor("/nowhere")._tree(node) == []


def _unused_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
