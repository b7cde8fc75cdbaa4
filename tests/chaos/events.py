"""Events that disturb a run, with real signals to real processes.

Each event is a function of the world and a random generator that returns a short description. Nodes that an event
removes are replaced later, as machines are in a cloud.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.cut import FAULTS
from tests.chaos.world import SAVE_EVERY, World, processes
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.cluster.faults import drain_node, flip_byte
from tidewheel.cluster.local import NodeHandle
from tidewheel.errors import ClusterError, OwnershipError
from tidewheel.storage import store
from tidewheel.train.config import TrainConfig

Event = Callable[[World, random.Random], str]
REPLACED_SECONDS = 8.0
"""Time after which a new machine replaces a lost one."""
AWAY_SECONDS = 10.0
FOUND_SECONDS = 120.0
"""Longest time until a flipped bit is found, also on a busy machine, if all steps are checked."""
SILENT_SECONDS = 12.0
NOTICE_SECONDS = 15.0
FROZEN_SECONDS = 12.0
SLOW_SECONDS, SLOW_FACTOR = 20.0, 4.0
CUT_SECONDS = (5.0, 20.0)
SAVE_POLL_SECONDS = 0.002
"""Time between two looks for a save: that of a small model takes 20 to 100 ms."""


def kill_worker(world: World, rng: random.Random) -> str:
    pid = _random_worker(world, rng)
    return f"worker {pid}" if pid is not None and send(pid, signal.SIGKILL) else "no worker was there"


def stop_worker(world: World, rng: random.Random) -> str:
    """Stop a worker, which closes no connection. Some workers are continued later, when the run has replaced them."""
    pid = _random_worker(world, rng)
    if pid is None or not send(pid, signal.SIGSTOP):
        return "no worker was there"
    if rng.random() < 0.5:
        later(20, lambda: send(pid, signal.SIGCONT))
        return f"worker {pid}, woken after 20 s"
    return f"worker {pid}"


def freeze_agent(world: World, rng: random.Random) -> str:
    """Stop the memory agent of a node, which relays what the workers of the node say."""
    pids = sorted(processes(world.cluster, "ray::AgentActor"))
    pid = rng.choice(pids) if pids else None
    return f"agent {pid}" if pid is not None and send(pid, signal.SIGSTOP) else "no agent was there"


def kill_node(world: World, rng: random.Random) -> str:
    return _lose(world, rng.choice(world.cluster.nodes))


def kill_node_of_rank_0(world: World, rng: random.Random) -> str:
    return _lose(world, world.node_of_rank(0) or rng.choice(world.cluster.nodes))


def freeze_node(world: World, rng: random.Random) -> str:
    """Stop all processes of a node. After 20 s the node is lost, or it continues after the run has replaced it."""
    node = rng.choice(world.cluster.nodes)
    pids = world.cluster.processes(node)
    for pid in pids:
        send(pid, signal.SIGSTOP)
    if rng.random() < 0.5:
        later(20, lambda: [send(pid, signal.SIGCONT) for pid in pids])
        later(20 + REPLACED_SECONDS, lambda: replaced_if_gone(world, node))
        return f"node {node.node_id[:8]}, back after 20 s"
    later(20, lambda: _lose(world, node))
    return f"node {node.node_id[:8]}, gone after 20 s"


def drain(world: World, rng: random.Random) -> str:
    node = rng.choice(world.cluster.nodes)
    accepted = _drained(world, node, NOTICE_SECONDS)
    later(NOTICE_SECONDS, lambda: _lose(world, node))
    return f"node {node.node_id[:8]}, {NOTICE_SECONDS:g} s notice{'' if accepted else ', refused'}"


def join(world: World, rng: random.Random) -> str:
    """Add a node, and drain the oldest one a little later."""
    _add(world)
    oldest = world.cluster.nodes[0]

    def leave() -> None:
        _drained(world, oldest, 5)
        time.sleep(5)
        _lose(world, oldest, replace=False)

    later(10, leave)
    return f"one node; {oldest.node_id[:8]} is drained 10 s later"


def kill_two(world: World, rng: random.Random) -> str:
    if rng.random() < 0.5 and len(world.cluster.nodes) > 1:
        return " and ".join([_lose(world, node) for node in rng.sample(world.cluster.nodes, 2)])
    pids = rng.sample(sorted(world.trainers()), min(2, len(world.trainers())))
    for pid in pids:
        send(pid, signal.SIGKILL)
    return f"workers {pids}"


def kill_during_recovery(world: World, rng: random.Random) -> str:
    first = kill_worker(world, rng)
    time.sleep(rng.uniform(0.1, 4.0))
    return f"{first}, then {kill_worker(world, rng)}"


def kill_during_save(world: World, rng: random.Random, seconds: float = 3 * SAVE_EVERY) -> str:
    """Kill a worker while a checkpoint has files and no manifest yet, or after `seconds`."""
    checkpoints = Path(world.config.run_uri, "checkpoints")
    past = {folder.name for folder in checkpoints.glob("step_*")}
    saving: list[Path] = []

    def saves() -> bool:
        saving[:] = [folder for folder in checkpoints.glob("step_*")
                     if folder.name not in past and not (folder / "manifest.json").exists()]
        return bool(saving)

    pid = _random_worker(world, rng)
    caught = world.wait_for(saves, seconds, SAVE_POLL_SECONDS)
    if not caught:
        return f"{kill_worker(world, rng)}, no save was seen"
    if pid is None or not send(pid, signal.SIGKILL):  # it was lost, and another one saves
        return f"{kill_worker(world, rng)}, at a save"
    within = not (saving[0] / "manifest.json").exists()
    return f"worker {pid}, {'during' if within else 'just after'} a save"


def kill_driver(world: World, rng: random.Random) -> str:
    world.kill_driver()
    return "started again at once"


def freeze_driver(world: World, rng: random.Random) -> str:
    """Stop the driver's process alone, which nobody needs."""
    with world.frozen_driver() as there:
        if not there:
            return "no driver was there"
        time.sleep(FROZEN_SECONDS)
    return f"{FROZEN_SECONDS:g} s"


def kill_coordinator(world: World, rng: random.Random) -> str:
    """Kill the run's coordinator. The driver starts another one."""
    return _kill_beside(world, "Coordinator")


def kill_controller(world: World, rng: random.Random) -> str:
    """Kill Ray Train's controller, whose death ends the workers. The driver starts another one."""
    return _kill_beside(world, "ElasticController")


def cut_network(world: World, rng: random.Random) -> str:
    """Let the network between the coordinator and a node's workers fail for a while."""
    nodes = sorted({node.node_id[:12] for node in world.trainers().values()})
    if not nodes:
        return "no worker was there"
    node, fault, seconds = rng.choice(nodes), rng.choice(FAULTS), round(rng.uniform(*CUT_SECONDS))
    _write(world.folder / "network", {"node": node, "fault": fault})
    time.sleep(seconds)
    (world.folder / "network").unlink()
    return f"node {node[:8]}, {fault}, {seconds} s"


def slow_worker(world: World, rng: random.Random) -> str:
    """Let the steps of a node's workers take several times as much of a processor for a while."""
    nodes = sorted({node.node_id[:12] for node in world.trainers().values()})
    if not nodes:
        return "no worker was there"
    node = rng.choice(nodes)
    _write(world.folder / "slow", {"node": node, "factor": SLOW_FACTOR})
    time.sleep(SLOW_SECONDS)
    (world.folder / "slow").unlink()
    return f"node {node[:8]}, {SLOW_FACTOR:g} times slower for {SLOW_SECONDS:g} s"


def storage_away(world: World, rng: random.Random) -> str:
    flag = world.folder / "storage-away"
    flag.touch()
    time.sleep(AWAY_SECONDS)
    flag.unlink()
    return f"{AWAY_SECONDS:g} s"


def storage_silent(world: World, rng: random.Random) -> str:
    """Let the store accept every request and answer none."""
    flag = world.folder / "storage-silent"
    flag.touch()
    time.sleep(SILENT_SECONDS)
    flag.unlink()
    return f"{SILENT_SECONDS:g} s"


def second_driver(world: World, rng: random.Random) -> str:
    """Start another driver of the run with another learning rate while the first one trains; it must be refused."""
    if not world.wait_for(world.driver_trains, 120) or world.over.is_set():
        return "no worker trained: not done"
    code, error = world.second_driver("optimizer.learning_rate=1e-2")
    if world.over.is_set():
        return "the run ended meanwhile"
    if code != OwnershipError.exit_code or "is being trained by" not in error:
        world.problems.append(f"a second driver was not refused: code {code}, {error[-300:]}")
    return f"code {code}: {error.splitlines()[0][:120] if error else ''}"


def flip_bit(world: World, rng: random.Random) -> str:
    """Flip a bit of a weight of a random worker; the run must name its node, unless it is lost by then."""
    if world.config.guards.recomputation is None:
        return "guards.recomputation is not set: not done"
    nodes = sorted({node.node_id[:12] for node in world.trainers().values()})
    if len(nodes) < 3:
        return f"{len(nodes)} node(s) train, of which no majority is right: not done"
    file, node, known = world.folder / "flip", rng.choice(nodes), len(world.events("corruption"))
    _write(file, {"node": node, "seed": rng.randrange(1 << 30)})
    done = file.with_suffix(".done")
    world.wait_for(done.exists, FOUND_SECONDS)
    if not done.exists():
        file.unlink(missing_ok=True)
        return f"node {node[:8]} did no step: not done"
    done.unlink()
    world.wait_for(lambda: len(world.events("corruption")) > known, FOUND_SECONDS)
    found = world.events("corruption")[known:]
    if not found:
        world.problems.append(f"a flipped bit on node {node} was not found in {FOUND_SECONDS:g} s")
        return f"node {node[:8]}, not found"
    detail = found[0]["detail"]
    if not any(name.startswith(node) for name in detail["nodes"]):
        world.problems.append(f"a bit flipped on node {node}, but the run names {detail['nodes']}")
    return f"node {node[:8]}, found at step {detail['step']}, back to {detail['back_to']}"


def corrupt_newest(world: World, rng: random.Random) -> str:
    """Flip a byte of the newest checkpoint, then kill all workers, so that the run must load from storage."""
    checkpoints = store(world.config.run_uri).child("checkpoints")
    complete = [info for info in list_checkpoints(checkpoints) if info.complete]
    if len(complete) < 2:
        return "fewer than two checkpoints: not done"
    newest = complete[-1]
    key = rng.choice([key for key in newest.keys if key.endswith(".safetensors")])
    with contextlib.suppress(FileNotFoundError):
        flip_byte(checkpoints, key, -rng.randrange(1, 2000))
    for pid in world.trainers():
        send(pid, signal.SIGKILL)
    return f"{key}, then all workers were killed"


EVENTS: dict[str, Event] = {function.__name__: function for function in (
    kill_worker, stop_worker, kill_node, kill_node_of_rank_0, freeze_node, drain, join, kill_two, kill_during_recovery,
    kill_during_save, kill_driver, freeze_driver, kill_coordinator, kill_controller, cut_network, slow_worker,
    storage_away, storage_silent, second_driver, corrupt_newest, flip_bit)}


def usual(config: TrainConfig) -> list[str]:
    """Return the events that a run can be disturbed with: a flipped bit only if it looks for one."""
    return [kind for kind in EVENTS if kind != "flip_bit" or config.guards.recomputation is not None]


# -- shared functions --------------------------------------------------------------------------------------------------


def _random_worker(world: World, rng: random.Random) -> int | None:
    pids = sorted(world.trainers())
    return rng.choice(pids) if pids else None


def send(pid: int, signum: int) -> bool:
    """Send a signal to a process, and return whether it was there."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def _kill_beside(world: World, actor: str) -> str:
    """Kill the run's actor on the driver's node."""
    killed = [pid for pid in world.beside(actor) if send(pid, signal.SIGKILL)]
    return f"process {killed}" if killed else "it was not there"


def _write(file: Path, asked: dict[str, Any]) -> None:
    """Write a file that the workers read, in one piece."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(asked))
    os.replace(new, file)


def _drained(world: World, node: NodeHandle, notice_seconds: float) -> bool:
    """Ask Ray to drain a node; return whether it will. A node may be gone already, and its raylet with it."""
    from ray.exceptions import RpcError

    try:
        return drain_node(world.cluster.address, node.node_id, notice_seconds=notice_seconds)
    except RpcError:
        return False


def _lose(world: World, node: NodeHandle, *, replace: bool = True) -> str:
    try:
        world.cluster.kill_node(node)
    except ClusterError:
        return f"node {node.node_id[:8]} was gone already"
    if replace:
        later(REPLACED_SECONDS, lambda: _add(world))
    return f"node {node.node_id[:8]}"


def replaced_if_gone(world: World, node: NodeHandle) -> None:
    """Add a node if Ray has given this one up, whose raylet then ends by itself."""
    if not send(node.pid, 0):
        with contextlib.suppress(ClusterError):
            world.cluster.kill_node(node)
        _add(world)


def _add(world: World) -> None:
    with contextlib.suppress(ClusterError):  # the cluster is being stopped
        world.cluster.add_node()


def later(seconds: float, action: Callable[[], object]) -> None:
    """Do something in `seconds`, in a thread that ends with this process."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
