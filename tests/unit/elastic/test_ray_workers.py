"""The worker group: which workers leave and join it, and where processes start. Ray and the coordinator are fakes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train.v2._internal.execution.worker_group import WorkerStatus

from tidewheel.elastic import ray_group, ray_process, ray_workers
from tidewheel.elastic.nodes import Node
from tidewheel.elastic.ray_group import ElasticWorkerGroup, WorkerGroups
from tidewheel.elastic.ray_process import (
    LostWorkerError,
    SilentWorkerError,
    Worker,
    actor_resources,
    train_environment,
)
from tidewheel.elastic.ray_workers import Workers
from tidewheel.elastic.worker import RestartNeeded
from tidewheel.errors import ClusterError, OwnershipError, ShardError
from tidewheel.train.elastic_config import ElasticConfig

RUNNING = WorkerStatus(running=True)


class Answer:
    """Reference to a call's answer: ready with a value or an error, or not ready."""

    def __init__(self, value: Any = None, *, ready: bool = True) -> None:
        self.value = value
        self.ready = ready


class Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Answer:
        try:
            value = self._function(*arguments)
        except Exception as error:
            value = error
        return value if isinstance(value, Answer) else Answer(value)


class Actor:
    """Worker process on a node."""

    def __init__(self, ray: FakeRay, node: str) -> None:
        self.name = f"{node}-{len(ray.actors)}"
        self.node = node
        self.status: Any = RUNNING
        self.begun: list[int] = []
        self.begins: Any = None
        self.up = node not in ray.slow
        self.identify = Method(self._identify)
        self.poll_status = Method(lambda: self.status)
        self.begin = Method(self._begin)
        ray.actors.append(self)

    def _identify(self) -> Answer:
        answer = Answer((self.name, self.node), ready=self.up)
        self.identity = answer
        return answer

    def _begin(self, context: Any, function: Any, index: int) -> Any:
        self.begun.append(index)
        return self.begins


class FakeRay:
    """`ray.get`, `wait`, `kill` and `remote`, with a clock that advances only while a call waits."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.actors: list[Actor] = []
        self.killed: list[str] = []
        self.slow: set[str] = set()
        """Nodes on which no process starts."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        if isinstance(reference, list):
            return [self.get(item) for item in reference]
        if not reference.ready:
            raise GetTimeoutError("not ready")
        if isinstance(reference.value, BaseException):
            raise reference.value
        return reference.value

    def wait(self, references: list[Answer], num_returns: int = 1, timeout: float | None = None) -> Any:
        finished = [reference for reference in references if reference.ready]
        if len(finished) < num_returns:
            self.now += timeout or 0.0
        return finished, [reference for reference in references if not reference.ready]

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor.name)

    def remote(self, **_: Any) -> Any:
        def options(scheduling_strategy: Any) -> Any:
            return SimpleNamespace(remote=lambda: Actor(self, scheduling_strategy.node_id))

        return lambda _: SimpleNamespace(options=options)


class Coordinator:
    """A coordinator with prepared answers that records the calls it receives."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.bad_nodes: set[str] = set()
        self.owner: Exception | None = None
        self.tolerates = True
        self.expected: list[tuple[dict[str, str], bool]] = []
        self.errors: list[tuple[str, str, bool]] = []
        self.said: list[str] = []
        self.fenced = Method(lambda: set(self.gone))
        self.avoided = Method(lambda: set(self.bad_nodes))
        self.replaced_nodes: set[str] = set()
        self.nodes_out = Method(lambda: set(self.replaced_nodes))
        self.lost = Method(lambda: Answer(self.owner) if self.owner is None else _value(self.owner))
        self.dead = Method(lambda names, reason: names)
        self.say = Method(self.said.append)
        self.controller_started = Method(lambda: None)
        self.endpoint = Method(lambda: None)
        self.expect = Method(lambda names, anew: self.expected.append((names, anew)))
        self.raised = Method(self._raised)

    def _raised(self, name: str, kind: str, text: str, fatal: bool) -> bool:
        self.errors.append((name, kind, fatal))
        return self.tolerates and not fatal


def _value(error: Exception) -> Answer:
    answer = Answer()
    answer.value = SimpleNamespace(error=error)
    return answer


class World:
    """The nodes, Ray, the coordinator and the pool of a run with one to three workers of one CPU each."""

    def __init__(self, patch: pytest.MonkeyPatch, sizes: tuple[int, ...] = (1, 2, 3), standby: int = 0) -> None:
        self.ray = FakeRay()
        self.coordinator = Coordinator()
        self.nodes: list[Node] = []
        self.known_busy: set[str] = set()
        """Nodes of which Ray says that others hold what they have."""
        for module in (ray_group, ray_workers, ray_process):
            patch.setattr(module, "ray", self.ray)
            patch.setattr(module, "time", self.ray)
        patch.setattr(ray_workers, "NodeAffinitySchedulingStrategy", lambda node, soft: SimpleNamespace(node_id=node))
        patch.setattr(ray_workers.nodes, "alive", lambda *_: list(self.nodes))
        patch.setattr(ray_workers.nodes, "free", lambda: {
            node.node_id: {} if node.node_id in self.known_busy else node.resources for node in self.nodes})
        patch.setattr(ray_workers.nodes, "usable",
                      lambda *_: [node for node in self.nodes if not node.draining])
        elastic = ElasticConfig(min_workers=sizes[0], max_workers=sizes[-1], standby_workers=standby,
                                start_timeout_seconds=60)
        self.pool = Workers(elastic, sizes, self.coordinator)

    def add(self, *names: str, cpus: float = 1.0, **more: Any) -> None:
        self.nodes += [Node(name, "127.0.0.1", 1, {"CPU": cpus}, **more) for name in names]

    def start(self) -> ElasticWorkerGroup:
        return WorkerGroups(self.pool).create("run", SimpleNamespace(train_fn_ref="function"), [])

    def names(self, group: ElasticWorkerGroup) -> list[str]:
        return [worker.node for worker in group.get_workers()]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_group_begins_with_the_largest_legal_number_that_fits(world: World):
    world.add("a", "b", cpus=2)
    group = world.start()
    assert Counter(world.names(group)) == {"a": 2, "b": 1}
    assert [actor.begun for actor in world.ray.actors] == [[0], [1], [2]]
    assert world.coordinator.expected == [({actor.name: actor.node for actor in world.ray.actors}, True)]
    assert group.get_latest_poll_status() is None
    assert group.get_worker_group_state() is None
    assert list(group.poll_status(0.1).worker_statuses.values()) == [RUNNING] * 3


def test_processes_that_the_driver_started_become_the_group(world: World):
    world.add("a", "b", cpus=2)
    world.known_busy = {"b"}
    early = world.pool.start_early()
    assert [node for _, node in early] == ["a", "a"]  # only where there is room now
    controller = Workers(world.pool.elastic, world.pool.sizes, world.coordinator)
    controller.early = early
    world.known_busy = set()
    group = WorkerGroups(controller).create("run", SimpleNamespace(train_fn_ref="function"), [])
    assert Counter(worker.node for worker in group.get_workers()) == {"a": 2, "b": 1}
    assert len(world.ray.actors) == 3
    assert not controller.early
    assert not world.ray.killed


def test_early_processes_are_waited_for_until_they_hold_room(world: World, monkeypatch: pytest.MonkeyPatch):
    """Generators of rollouts, which start next, would take the node of a process that Ray has not placed."""
    world.add("a", "b", cpus=2)
    began = world.ray.monotonic()

    def free() -> dict[str, dict[str, float]]:
        passed = world.ray.monotonic() - began
        return {"a": {"CPU": 2.0 if passed < 0.2 else 0.0}, "b": {"CPU": 2.0 if passed < 0.4 else 1.0}}

    monkeypatch.setattr(ray_workers.nodes, "free", free)
    early = world.pool.start_early(placed=True)
    assert Counter(node for _, node in early) == {"a": 2, "b": 1}
    assert 0.4 <= world.ray.monotonic() - began < 1


def test_early_processes_that_are_never_placed_are_not_waited_for_long(world: World):
    world.add("a")
    before = world.ray.monotonic()
    world.pool.start_early(placed=True)  # Ray goes on to show the node as free
    assert ray_workers.PLACED_SECONDS <= world.ray.monotonic() - before < ray_workers.PLACED_SECONDS + 1


def test_processes_that_the_driver_started_on_an_avoided_node_end(world: World):
    world.add("a", "b")
    early = world.pool.start_early()
    assert [node for _, node in early] == ["a", "b"]
    world.coordinator.bad_nodes = {"a"}
    world.pool.early = early
    assert world.names(world.start()) == ["b"]
    assert world.ray.killed == [early[0][0].name]


def test_spot_nodes_are_filled_last_so_that_rank_0_is_on_an_on_demand_node(world: World):
    world.add("spot", labels={"ray.io/market-type": "spot"})
    world.add("stays")
    assert world.names(world.start()) == ["stays", "spot"]


def test_a_group_does_not_wait_for_a_slow_process_when_a_legal_number_is_up(world: World):
    world.add("a", "b")
    world.ray.slow = {"b"}
    group = world.start()
    assert world.names(group) == ["a"]
    assert world.ray.now == pytest.approx(1000 + ray_workers.START_SECONDS)
    slow = next(actor for actor in world.ray.actors if actor.node == "b")
    slow.identity.ready = True
    assert len(group.poll_status(0.1).worker_statuses) == 2
    assert slow.begun == [1]
    assert world.coordinator.expected[-1] == ({slow.name: "b"}, False)


def test_with_a_legal_number_a_group_waits_only_briefly_for_a_node_that_others_hold(world: World):
    """Generators of rollouts hold their nodes until the run ends; after a driver's death each start lost 15 s."""
    world.add("free", "held")
    world.known_busy = world.ray.slow = {"held"}
    group = world.start()
    assert world.names(group) == ["free"]
    assert world.ray.now == pytest.approx(1000 + ray_workers.CROWDED_SECONDS)
    waiting = next(actor for actor in world.ray.actors if actor.node == "held")
    waiting.identity.ready = True
    assert len(group.poll_status(0.1).worker_statuses) == 2, "it joins when the node is given back"


def test_a_node_that_offers_more_workers_than_it_has_room_for_is_crowded(world: World):
    world.add("node", cpus=2)
    world.pool.start_on(["node", "node", "node"])
    assert [process.crowded for process in world.pool.starting] == [False, False, True]


def test_without_room_the_start_waits_and_then_gives_up(world: World):
    with pytest.raises(ClusterError, match=r"1 worker\(s\) found no room on nodes for 60 s"):
        world.start()
    assert world.coordinator.said == ["waiting for nodes"]


def test_processes_that_never_come_up_end_the_start_and_are_killed(world: World):
    world.add("a")
    world.ray.slow = {"a"}
    with pytest.raises(ClusterError, match=r"1 worker\(s\) did not come up on nodes for 60 s"):
        world.start()
    assert set(world.ray.killed) == {actor.name for actor in world.ray.actors}


def test_a_start_waits_for_no_node_that_others_hold_if_another_one_is_free(world: World):
    world.add("held", "also held", "free")
    world.pool.most, world.pool.sizes = 1, (1,)
    world.ray.slow = {"held", "also held"}
    group = world.start()
    assert world.names(group) == ["free"]
    assert world.ray.now <= 1000 + 2 * ray_workers.START_SECONDS + 1


def test_a_start_begins_where_there_is_room_now(world: World):
    world.add("held", "free")
    world.pool.most, world.pool.sizes = 1, (1,)
    world.known_busy = world.ray.slow = {"held"}
    assert world.names(world.start()) == ["free"]
    assert [actor.node for actor in world.ray.actors] == ["free"]


def test_a_run_that_another_driver_owns_does_not_start(world: World):
    error = OwnershipError("taken over", where="run")
    world.coordinator.lost = Method(lambda: _returned(error))
    with pytest.raises(OwnershipError):
        world.start()
    assert world.ray.actors == []


def _returned(error: Exception) -> Answer:
    """Return the answer of a call that returns an error instead of raising it."""
    class Returned(Answer):
        ready = True

    answer = Returned()
    answer.value = error
    return answer


def test_a_node_to_avoid_is_used_only_if_no_legal_number_fits_elsewhere(world: World):
    world.add("bad", "good")
    world.coordinator.bad_nodes = {"bad"}
    assert world.names(world.start()) == ["good"]
    world.nodes = [node for node in world.nodes if node.node_id == "bad"]
    assert world.names(world.start()) == ["bad"]


def test_a_node_to_avoid_is_used_if_others_hold_the_good_ones(world: World):
    world.add("bad", "held")
    world.pool.most, world.pool.sizes = 1, (1,)
    world.coordinator.bad_nodes = {"bad"}
    world.ray.slow = {"held"}
    group = world.start()
    assert world.names(group) == ["bad"]
    assert world.ray.now <= 1000 + 2 * ray_workers.START_SECONDS + 1


def test_a_node_to_avoid_is_used_soon_if_others_are_known_to_hold_the_good_ones(world: World):
    world.add("bad", "held")
    world.coordinator.bad_nodes = {"bad"}
    world.known_busy = world.ray.slow = {"held"}
    group = world.start()
    assert world.names(group) == ["bad"]
    assert world.ray.now <= 1000 + 2 * ray_workers.CROWDED_SECONDS


def test_while_others_hold_all_nodes_a_start_looks_at_them_every_few_seconds(world: World):
    world.add("a", "b")
    world.known_busy = world.ray.slow = {"a", "b"}
    with pytest.raises(ClusterError, match="did not come up"):
        world.start()
    assert len(world.ray.actors) <= 4, "two, and two more once the first have taken too long"
    assert world.ray.now <= 1000 + 60 + 2 * ray_workers.CROWDED_SECONDS


def test_a_worker_on_a_node_that_fails_often_is_not_replaced_while_it_lives(world: World):
    """Beside its substitute it would hold a CPU that a generator of rollouts waits for."""
    world.pool.most, world.pool.sizes = 1, (1,)
    world.add("a")
    group = world.start()
    world.add("b")
    world.coordinator.bad_nodes = {"a"}
    group.poll_status(0.1)
    assert [actor.node for actor in world.ray.actors] == ["a"]
    world.coordinator.replaced_nodes = {"a"}
    world.ray.now += ray_group.LOOK_SECONDS
    group.poll_status(0.1)
    assert [actor.node for actor in world.ray.actors] == ["a", "b"]


def test_lost_and_fenced_workers_leave_and_the_others_stay(world: World):
    world.add("a", "b", "c")
    group = world.start()
    first, second, third = world.ray.actors
    first.status = RayActorError()
    world.coordinator.gone = {second.name}
    world.nodes = world.nodes[2:]
    statuses = group.poll_status(0.1).worker_statuses
    assert statuses == {0: RUNNING}
    assert world.names(group) == ["c"]
    assert world.ray.killed == [second.name], "the lost worker's process has already ended"
    assert third.begun == [2]


def test_when_every_worker_is_lost_the_group_has_failed(world: World):
    world.add("a", "b")
    group = world.start()
    for actor in world.ray.actors:
        actor.status = RayActorError()
    errors = group.poll_status(0.1).errors
    assert [type(error) for error in errors.values()] == [LostWorkerError] * 2
    assert len(group.get_workers()) == 2


def test_a_group_whose_only_worker_is_cut_off_and_silent_has_failed(world: World):
    """A stopped process closes no connection and answers no poll."""
    world.pool.most, world.pool.sizes = 1, (1,)
    world.add("a")
    group = world.start()
    [worker] = group.get_workers()
    world.ray.actors[0].status = Answer(ready=False)
    assert not group.poll_status(0.1).errors
    world.coordinator.gone = {worker.name}
    [error] = group.poll_status(0.1).errors.values()
    assert isinstance(error, LostWorkerError)
    group.shutdown()
    assert world.ray.killed == [worker.name]


def test_the_coordinator_decides_whether_the_run_goes_on_without_a_worker_that_failed(world: World):
    world.add("a", "b", "c")
    group = world.start()
    world.ray.actors[0].status = WorkerStatus(running=False, error=RuntimeError("out of memory"))
    world.nodes = world.nodes[1:]
    assert set(group.poll_status(0.1).worker_statuses) == {0, 1}
    world.ray.actors[1].status = WorkerStatus(running=False, error=ShardError("damaged"))
    world.ray.actors[2].status = WorkerStatus(running=False, error=RestartNeeded("again"))
    assert [type(error) for error in group.poll_status(0.1).errors.values()] == [ShardError, RestartNeeded]
    assert [error[1:] for error in world.coordinator.errors] == [("RuntimeError", False), ("ShardError", True)]


def test_a_silent_worker_is_polled_once_and_counts_as_lost_after_the_limit(world: World, monkeypatch):
    monkeypatch.setenv(ray_group.SILENT_SECONDS_VARIABLE, "30")
    world.add("a", "b")
    group = world.start()
    calls = []
    world.ray.actors[0].poll_status = Method(lambda: calls.append(1) or Answer(ready=False))
    world.coordinator.tolerates = False
    assert group.poll_status(20).errors == {}
    assert isinstance(group.poll_status(20).errors[0], SilentWorkerError)
    assert calls == [1]


def test_a_process_starts_on_a_node_that_joins_but_not_again_soon_after_one_that_did_not(world: World):
    world.add("a")
    group = world.start()
    world.add("b")
    group.poll_status(0.1)
    assert [actor.node for actor in world.ray.actors] == ["a", "b"]
    broken = world.ray.actors[1]
    broken.identity.value = RayActorError()
    world.ray.now += ray_group.LOOK_SECONDS
    group.poll_status(0.1)
    assert world.ray.killed == [broken.name]
    world.ray.now += ray_workers.AGAIN_SECONDS - 1
    group.poll_status(0.1)
    assert len(world.ray.actors) == 2
    world.ray.now += 1
    group.poll_status(0.1)
    group.poll_status(0.1)
    assert [actor.node for actor in world.ray.actors] == ["a", "b", "b"]
    assert world.names(group) == ["a", "b"]


def test_a_slow_start_ends_when_its_substitute_has_come_up(world: World):
    """Both would hold a CPU of which a generator of rollouts may be in need."""
    world.pool.most, world.pool.sizes = 2, (1, 2)
    world.add("a", "b")
    world.ray.slow = {"b"}
    group = world.start()
    slow = world.ray.actors[1]
    world.add("c", "d")
    for _ in range(3):
        world.ray.now += ray_workers.START_SECONDS
        group.poll_status(0.1)
    assert world.names(group) == ["a", "c"]
    assert world.ray.killed == [slow.name]
    slow.identity.ready = True
    group.poll_status(0.1)
    assert world.names(group) == ["a", "c"]
    assert len(world.ray.actors) == 3


def test_two_slow_starts_that_come_up_at_once_leave_one(world: World):
    world.pool.most, world.pool.sizes = 2, (1, 2)
    world.add("a", "b")
    world.ray.slow = {"b", "c"}
    group = world.start()
    world.add("c")
    world.ray.now += ray_workers.START_SECONDS
    group.poll_status(0.1)
    assert [actor.node for actor in world.ray.actors] == ["a", "b", "c"]
    for actor in world.ray.actors[1:]:
        actor.identity.ready = True
    group.poll_status(0.1)
    assert world.names(group) == ["a", "b"]
    assert world.ray.killed == [world.ray.actors[2].name]


def test_a_substitute_joins_beside_a_worker_whose_node_leaves(world: World):
    world.pool.most, world.pool.sizes = 2, (1, 2)
    world.add("a", "b", "c")
    group = world.start()
    world.nodes = [Node(node.node_id, node.host, node.port, node.resources, draining=node.node_id == "a")
                   for node in world.nodes]
    for _ in range(3):
        world.ray.now += ray_group.LOOK_SECONDS
        group.poll_status(0.1)
    assert world.names(group) == ["a", "b", "c"]


def test_a_worker_that_dies_while_it_starts_does_not_join(world: World):
    world.add("a", "b")
    world.ray.slow = {"b"}
    group = world.start()
    late = next(actor for actor in world.ray.actors if actor.node == "b")
    late.begins = RayActorError()
    late.identity.ready = True
    assert len(group.poll_status(0.1).worker_statuses) == 1
    assert world.ray.killed == [late.name]


def test_a_restart_uses_the_processes_that_answer_and_have_ended_their_function(world: World):
    world.add("a", "b", "c")
    group = world.start()
    idle, busy, dead = world.ray.actors
    idle.status = WorkerStatus(running=False)
    dead.status = RayActorError()
    world.pool.keep = True
    group.shutdown()
    assert set(world.ray.killed) == {busy.name, dead.name}
    assert [worker.name for worker in world.pool.kept] == [idle.name]
    again = world.start()
    assert idle.begun == [0, 0]
    assert Counter(world.names(again)) == {"a": 1, "b": 1, "c": 1}
    again.shutdown()
    assert world.pool.kept == []
    assert idle.name in world.ray.killed


def test_a_group_whose_workers_cannot_start_leaves_no_process(world: World, monkeypatch):
    world.add("a")
    monkeypatch.setattr(Actor, "_begin", lambda *_: RayActorError())
    with pytest.raises(RayActorError):
        world.start()
    assert world.ray.killed == [world.ray.actors[0].name]


def test_resources_and_settings_of_ray_train_are_passed_on(monkeypatch: pytest.MonkeyPatch):
    assert actor_resources({"CPU": 2, "GPU": 1, "accelerator": 3}) == {
        "num_cpus": 2, "num_gpus": 1, "memory": None, "resources": {"accelerator": 3}}
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "9")
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere")
    assert train_environment()["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] == "9"
    assert not [name for name in train_environment() if not name.startswith("RAY_TRAIN_")]
    assert os.environ["RAY_ADDRESS"] == "elsewhere"


def test_a_poll_of_many_workers_looks_up_each_answer_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done four times a second in the controller: a search for each answer takes 0.07 s of CPU
    with 1,024 workers."""
    compared = [0]

    def equal(one: object, other: object) -> bool:
        compared[0] += 1
        return one is other

    world.add("n")
    group = world.start()
    group.workers = [Worker(Actor(world.ray, "n"), f"w{index}", "n") for index in range(200)]
    monkeypatch.setattr(Answer, "__eq__", equal)
    monkeypatch.setattr(Answer, "__hash__", object.__hash__)
    assert len(group._poll(1.0)) == 200
    assert compared[0] < 1000


def test_a_poll_that_is_pending_is_not_repeated():
    answers = iter([Answer(), Answer()])
    worker = Worker(SimpleNamespace(poll_status=Method(lambda: next(answers))), "name", "node")
    assert worker.poll() is worker.poll()
