"""The worker processes of a run: where there is room for them, those that come up, and those kept for the next group.

A worker is Ray Train's worker actor (`ray_process`). Placing it and ending it use public Ray Core only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidewheel.elastic import layout, nodes
from tidewheel.elastic.ray_process import (
    ElasticRayTrainWorker,
    Starting,
    Worker,
    actor_resources,
    result,
    train_environment,
)
from tidewheel.errors import ClusterError
from tidewheel.placement import with_labels
from tidewheel.train.elastic_config import ElasticConfig

START_SECONDS = 15.0
"""Longest wait of a group for processes that come up, once a legal number is up. The others join it later."""
CROWDED_SECONDS = 3.0
"""The same for processes on nodes whose resources others held when they were started, such as generators of rollouts.
What a process that has just ended held may still seem to be held."""
PLACED_SECONDS = 3.0
"""Longest wait until Ray shows that new processes hold resources. Its figures may be a second old."""
PLACED_PAUSE = 0.1
"""Pause between two such looks, each of which reads the resources of all nodes."""
SETTLE_SECONDS = 10.0
"""Longest wait until Ray has noticed dead nodes: 1-2 s on a local cluster, longer with Ray's defaults."""
IDLE_SECONDS = 0.5
"""Pause between two looks for room while there is none."""
AGAIN_SECONDS = 10.0
"""Pause after a process that did not come up, before the next is started."""


class Workers:
    """The worker processes of a run, through all of Ray Train's groups; lives in the controller.

    Args:
        elastic: resources of a worker, and limits on the number of workers.
        sizes: legal numbers of workers.
        coordinator: handle of the run's coordinator.
    """

    def __init__(self, elastic: ElasticConfig, sizes: tuple[int, ...], coordinator: Any) -> None:
        self.elastic = elastic
        self.coordinator = coordinator
        self.sizes = sizes
        self.most = max(sizes) + elastic.standby_workers
        self.early: list[tuple[Any, str]] = []
        """Actors that were started before the controller, and their nodes."""
        self.keep = False
        """Whether the next shutdown of a group leaves the processes that answer."""
        self.kept: list[Worker] = []
        self.starting: list[Starting] = []
        self.start_again_at = 0.0
        """Monotonic time before which no process is started beside a group that trains."""

    def gather(self) -> list[Worker]:
        """Return a legal number of workers: those started early or kept, and new ones, once there is room for them.

        Raises:
            ClusterError: there was no room, or no worker came up, for `elastic.start_timeout_seconds`.
            OwnershipError: another driver has taken over the run.
        """
        self.adopt(self.early)
        self.early = []
        no_room_since: float | None = None
        not_up_since: float | None = None
        while True:
            lost = ray.get(self.coordinator.lost.remote())
            if lost is not None:
                raise lost
            usable = nodes.usable(self.elastic.placement.selector, SETTLE_SECONDS)
            size = layout.largest_fit(self.sizes, layout.slots([node.resources for node in usable], self.elastic.needs))
            if not size:
                no_room_since = self._waited(no_room_since, "found no room")
                time.sleep(IDLE_SECONDS)  # until the next look at the nodes
                continue
            no_room_since = None
            workers = self._take_kept()
            workers += self._start_up_to(size, workers)
            if layout.largest_fit(self.sizes, len(workers)):
                return workers
            self.kept = workers
            not_up_since = self._waited(not_up_since, "did not come up")

    def _waited(self, since: float | None, problem: str) -> float:
        """Return since when the run has waited for workers; raise once that is too long."""
        now = time.monotonic()
        limit = self.elastic.start_timeout_seconds
        if since is None:
            self.coordinator.say.remote("waiting for nodes")
            return now
        if now - since > limit:
            where = with_labels(self.elastic.placement.selector)
            raise ClusterError(f"{min(self.sizes)} worker(s) {problem} on nodes{where} for {limit:g} s",
                               where="elastic.min_workers",
                               fix="add nodes and start the run again: it continues from its last checkpoint")
        return since

    def _start_up_to(self, size: int, workers: list[Worker]) -> list[Worker]:
        """Start processes in addition to `workers`, up to `size` in all; return the processes that started."""
        held = [*(worker.node for worker in workers), *(process.node for process in self.starting)]
        expected = len(workers) + len(self.quick(CROWDED_SECONDS))
        missing = size - expected
        avoided: set[str] = ray.get(self.coordinator.avoided.remote(), timeout=30)
        node_ids = self.free_places(Counter(held), missing, settle_seconds=SETTLE_SECONDS, avoided=avoided)
        if avoided and not layout.largest_fit(self.sizes, expected + len(node_ids)):
            node_ids = self.free_places(Counter(held), missing)  # a node that is better avoided is better than none
        self.start_on(node_ids)
        return self._come_up(size - len(workers), len(workers))

    def _come_up(self, requested: int, present: int) -> list[Worker]:
        """Wait until processes have started, for START_SECONDS at most; return the started ones.

        Those on crowded nodes are waited for only CROWDED_SECONDS if the workers are a legal number without them, or if
        there are no others: their nodes may be held until the run ends.

        Args:
            requested: most processes to wait for.
            present: workers that the group has besides.
        """
        workers: list[Worker] = []
        began = time.monotonic()
        while self.starting and len(workers) < requested:
            ends = began + START_SECONDS
            if layout.largest_fit(self.sizes, present + len(workers)):
                ends = max(process.began + CROWDED_SECONDS if process.crowded else ends for process in self.starting)
            elif all(process.crowded for process in self.starting):
                ends = began + CROWDED_SECONDS
            left = ends - time.monotonic()
            if left <= 0:
                break
            ray.wait([process.identity for process in self.starting], timeout=left)
            workers += self.take_started(requested - len(workers))
        return workers

    def take_started(self, room: int) -> list[Worker]:
        """Remove started processes from the starting ones, and end the processes that take too long.

        Args:
            room: most processes to return. Once these are up all others end: a start that was slow has had substitutes,
                and would hold what others, such as generators of rollouts, wait for.
        """
        now = time.monotonic()
        up: list[Worker] = []
        waiting: list[Starting] = []
        for process in self.starting:
            done, _ = ray.wait([process.identity], timeout=0)
            identity = result(process.identity) if done else None
            if identity is not None and len(up) < room:
                name, node = identity
                up.append(Worker(process.actor, name, node))
            elif identity is not None:
                ray.kill(process.actor)
            elif done or now - process.began > self.elastic.start_timeout_seconds:
                ray.kill(process.actor)
                self.start_again_at = now + AGAIN_SECONDS
            else:
                waiting.append(process)
        self.starting = waiting
        if len(up) >= room:
            self.end_starting()
        return up

    def start_on(self, node_ids: list[str]) -> None:
        """Start a process on the node of each id in `node_ids`; do not wait for it."""
        options = {**actor_resources(self.elastic.needs), "runtime_env": {"env_vars": train_environment()}}
        remote: Any = ray.remote(**options)(ElasticRayTrainWorker)
        free = nodes.free() if node_ids else {}
        begun = Counter[str]()
        for node in node_ids:
            actor = remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
            crowded = node in free and begun[node] >= self._slots(free[node])
            begun[node] += 1
            self.starting.append(Starting(actor, node, actor.identify.remote(), time.monotonic(), crowded))

    def start_early(self, *, placed: bool = False) -> list[tuple[Any, str]]:
        """Start processes where there is room now, before there is a controller; return their actors and node ids.

        They import what training needs while the coordinator's and the controller's processes come up. The caller's
        process owns the actors: they end when nobody holds them any more.

        Args:
            placed: return when they hold what they need of their nodes, after PLACED_SECONDS at the latest. Others that
                the caller starts next, such as generators of rollouts, then cannot take it.
        """
        usable = nodes.usable(self.elastic.placement.selector)
        size = layout.largest_fit(self.sizes, layout.slots([node.resources for node in usable], self.elastic.needs))
        free = nodes.free()
        node_ids = []
        for node_id, count in Counter(self.free_places(Counter(), size)).items():
            node_ids += [node_id] * min(count, self._slots(free.get(node_id, {})))
        self.start_on(node_ids)
        early = [(process.actor, process.node) for process in self.starting]
        self.starting = []
        if placed:
            self._await_room_taken(Counter(node_ids), free)
        return early

    def _await_room_taken(self, started: Counter[str], before: Mapping[str, Mapping[str, float]]) -> None:
        """Wait until Ray shows that as many slots as were started on each node have been taken since `before`."""
        until = time.monotonic() + PLACED_SECONDS
        while time.monotonic() < until:
            now = nodes.free()
            if all(self._slots(now.get(node, {})) <= self._slots(before[node]) - count
                   for node, count in started.items()):
                return
            time.sleep(PLACED_PAUSE)

    def adopt(self, early: list[tuple[Any, str]]) -> None:
        """Take over processes of `start_early` that another process has started."""
        now = time.monotonic()
        avoided: set[str] = ray.get(self.coordinator.avoided.remote(), timeout=30) if early else set()
        for actor, node in early:
            if node in avoided:
                ray.kill(actor)
            else:
                self.starting.append(Starting(actor, node, actor.identify.remote(), now))

    def free_places(self, taken: Counter[str], requested: int, *, settle_seconds: float = 0.0,
                    avoided: Collection[str] = ()) -> list[str]:
        """Return ids of nodes with room for up to `requested` more workers, an id for each worker.

        Args:
            taken: workers that each node has, by node id.
            requested: most ids to return.
            settle_seconds: longest wait until Ray has noticed dead nodes.
            avoided: ids of nodes on which no worker shall be started.
        """
        if requested <= 0:
            return []
        usable = nodes.usable(self.elastic.placement.selector, settle_seconds)
        free = nodes.free()
        places: list[tuple[bool, bool, str]] = []  # rank 0 belongs on a node that stays; then come those with room now
        for node in usable:
            if node.node_id not in avoided:
                count = max(0, self._slots(node.resources) - taken[node.node_id])
                now = self._slots(free.get(node.node_id, {}))
                places += [(node.spot, place >= now, node.node_id) for place in range(count)]
        places.sort(key=lambda place: place[:2])
        return [node_id for _, _, node_id in places[:requested]]

    def quick(self, crowded_seconds: float = START_SECONDS) -> list[Starting]:
        """Return the starting processes that may be up soon. Others may wait for what another actor on a node holds.

        Args:
            crowded_seconds: time in which a process on a crowded node may be up.
        """
        now = time.monotonic()
        return [process for process in self.starting
                if now - process.began < (crowded_seconds if process.crowded else START_SECONDS)]

    def _slots(self, resources: Mapping[str, float]) -> int:
        return layout.slots([resources], self.elastic.needs)

    def _take_kept(self) -> list[Worker]:
        """Return the kept processes that still answer; end the others."""
        kept = self.kept
        self.kept = []
        answers: dict[Any, Worker] = {worker.actor.identify.remote(): worker for worker in kept}
        done, silent = ray.wait(list(answers), num_returns=len(answers), timeout=2) if answers else ([], [])
        for answer in silent:
            ray.kill(answers[answer].actor)
        return [answers[answer] for answer in done if result(answer) is not None]

    def end_starting(self) -> None:
        """End the processes that are coming up."""
        for process in self.starting:
            ray.kill(process.actor)
        self.starting = []

    def discard(self) -> None:
        """End the processes that were kept or are coming up."""
        for worker in self.kept:
            ray.kill(worker.actor)
        self.kept = []
        self.end_starting()
