"""A local cluster starts, loses and gains nodes, and leaves nothing behind, however its owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray.job_submission import JobSubmissionClient

from tidewheel.cluster.local import LocalCluster, NodeHandle
from tidewheel.errors import ClusterError

pytestmark = pytest.mark.cluster


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 600) -> bool:
    until = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def test_nodes_die_and_join():
    with LocalCluster(nodes=2, cpus_per_node=1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            rows = [row for row in ray.nodes() if row["Alive"]]
            assert len(rows) == 3
            assert all(row["NodeManagerAddress"].startswith("127.") for row in rows)
            assert len({row["NodeManagerAddress"] for row in rows}) == 3
            head = ray.get_runtime_context().get_node_id()
            assert head not in {node.node_id for node in cluster.nodes}  # losing a node never kills the driver
            where = ray.remote(num_cpus=1)(lambda: ray.get_runtime_context().get_node_id())
            assert ray.get(where.remote()) != head

            first = cluster.nodes[0]
            processes = cluster.processes(first)
            assert first.pid == processes[0]
            began = time.monotonic()
            assert first.pid in cluster.kill_node(first)
            while sum(row["Alive"] for row in ray.nodes()) == 3:
                assert time.monotonic() - began < 600
                time.sleep(0.05)
            assert gone(processes)
            with pytest.raises(ClusterError, match="no such worker node"):
                cluster.kill_node(first)

            added = cluster.add_node(cpus=2)
            assert ray.cluster_resources()["CPU"] == 3
            assert cluster.nodes[-1] == added
            everything = [pid for node in cluster.nodes for pid in cluster.processes(node)]
        finally:
            ray.shutdown()
    assert gone(everything)
    with pytest.raises(ClusterError, match="not running"):
        cluster.add_node()


def test_two_clusters_and_a_job_server_side_by_side():
    with LocalCluster(nodes=0, dashboard=True) as one, LocalCluster(nodes=1) as other:
        assert one.address != other.address
        assert JobSubmissionClient(one.dashboard_url).list_jobs() == []
        one.close()
        ray.init(address=other.address, log_to_driver=False, logging_level="ERROR")
        try:
            assert sum(row["Alive"] for row in ray.nodes()) == 2
        finally:
            ray.shutdown()


OWNER = """
import sys, time
from tidewheel.cluster.local import LocalCluster
cluster = LocalCluster(nodes=1).__enter__()
print(cluster._folder, cluster._supervisor.pid, *cluster.processes(cluster.nodes[0]), flush=True)
if sys.argv[1] == "exception":
    raise RuntimeError("boom")
time.sleep(100)
"""


@pytest.mark.parametrize("end", [pytest.param("SIGTERM", marks=pytest.mark.long), "SIGKILL", "exception"])
def test_nothing_is_left_when_the_owner_ends(end):
    package = str(Path(__file__).parents[2] / "platform")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, end], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                             text=True, env=environment)
    assert owner.stdout is not None
    folder, *pids = owner.stdout.readline().split()
    assert len(pids) > 1
    if end != "exception":
        owner.send_signal(signal.Signals[end])
    owner.wait(timeout=600)
    owner.stdout.close()
    assert gone([int(pid) for pid in pids])
    assert not Path(folder).exists()


def test_a_handle_of_another_cluster_is_refused():
    cluster = LocalCluster(nodes=1)
    with pytest.raises(ClusterError, match="no such worker node"):
        cluster.kill_node(NodeHandle("0" * 56, 1))
