"""Light workers behind networks of their own: the real coordinator and the real `Member`, and no torch.

A worker does what one of a real run does with its connection: it joins, steps, leaves when its generation is aborted,
and ends when it was cut off. A step is done when all members of the generation have come to it, as with collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.elastic.network import Network, network
from tidewheel import jsonlog
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.faults import Report
from tidewheel.elastic.member import Member, RunControl
from tidewheel.elastic.messages import ExitReason, Join, Over
from tidewheel.ownership import acquire
from tidewheel.storage import store
from tidewheel.train.elastic_config import ElasticConfig

Links = Callable[[tuple[str, int]], AbstractContextManager[Network]]
STEPS = 1_000_000
STEP_SECONDS = 0.05


class Broken(Exception):
    """The generation was broken off."""


@dataclass
class Collectives:
    """What the ranks of all generations share: a step that waits for all of them."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    arrived: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """Ranks that have come to a step, by generation and step."""

    def meet(self, order: Join, step: int, group: LightGroup) -> None:
        """Wait until all ranks have come to this step.

        Raises:
            Broken: `LightGroup.break_off` was called.
        """
        with self.changed:
            ranks = self.arrived.setdefault((order.generation, step), set())
            ranks.add(order.rank)
            self.changed.notify_all()
            while len(ranks) < order.world_size and not group.broken:
                self.changed.wait()
        if group.broken:
            raise Broken


class LightGroup:
    """The group of one rank and generation."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.broken = False

    def break_off(self) -> None:
        """Let the rank leave."""
        with self._collectives.changed:
            self.broken = True
            self._collectives.changed.notify_all()


class LightWorker:
    """A worker and its network.

    Args:
        name: its name.
        link: the network between it and the coordinator.
        token: the run's token.
        collectives: shared by all workers.
    """

    def __init__(self, name: str, link: Network, token: str, collectives: Collectives) -> None:
        self.name = name
        self.link = link
        self.joined: list[Join] = []
        self.aborts = 0
        self.stands = False
        """It does no further step, as if its connections to the other workers were cut."""
        self.ended = threading.Event()
        """Its process would have ended."""
        self._collectives = collectives
        self._group: LightGroup | None = None
        self._member = Member(Endpoint(link.address, token), name, f"node of {name}")
        self._member._client._on_closed = self._end  # instead of ending this process
        threading.Thread(target=self._work, name=f"worker {name}", daemon=True).start()

    @property
    def generation(self) -> int:
        """The generation that it has joined last."""
        return self.joined[-1].generation if self.joined else -1

    @property
    def step(self) -> int:
        """Its last step in this generation."""
        return self._member.step

    def close(self) -> None:
        """End it as if its process was killed."""
        self._member.close()
        self._end()

    def _end(self) -> None:
        self.ended.set()
        if self._group is not None:
            self._group.break_off()

    def _work(self) -> None:
        while True:
            match self._member.orders.get():
                case Join() as order:
                    self._train(order)
                case Over():
                    return
            if self.ended.is_set():
                return

    def _train(self, order: Join) -> None:
        group = self._group = LightGroup(self._collectives)
        control = RunControl(self._member, order.rank)
        self._member.begin(order.generation, group)  # type: ignore[arg-type]
        self.joined.append(order)
        step = 0
        try:
            while True:
                step += 1
                time.sleep(STEP_SECONDS)
                while self.stands and not group.broken:
                    time.sleep(STEP_SECONDS)
                if order.rank == 0:
                    control.poll()
                self._collectives.meet(order, step, group)
                if order.rank == 0:
                    control.progress(step, STEPS)
                else:
                    self._member.step = step
        except Broken:
            self.aborts += 1
        self._member.left(Report(ExitReason.FAILED, "RuntimeError: connection closed by peer"))


@dataclass
class Team:
    """A coordinator and workers, each behind a network of its own."""

    folder: Path
    coordinator: Coordinator
    stack: ExitStack
    links: Links
    collectives: Collectives = field(default_factory=Collectives)
    workers: dict[str, LightWorker] = field(default_factory=dict)

    def add(self, *names: str, anew: bool = False) -> None:
        """Start workers."""
        endpoint = self.coordinator.endpoint()
        self.coordinator.expect({name: f"node of {name}" for name in names}, anew)
        for name in names:
            link = self.stack.enter_context(self.links(endpoint.address))
            self.workers[name] = LightWorker(name, link, endpoint.token, self.collectives)

    def __getitem__(self, name: str) -> LightWorker:
        return self.workers[name]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the details of the run's events of some kinds."""
        self.coordinator._record.flush()
        lines = jsonlog.read(store(str(self.folder)), "events.jsonl")
        return [line["detail"] for line in lines if line["kind"] in kinds]

    def wait(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait for a condition."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "\n".join(map(str, self.events("failure", "recovered")))
            time.sleep(0.01)

    def trains(self, generation: int, *names: str, steps: int = 2) -> None:
        """Wait until exactly these workers have done steps in a generation."""
        def all_step() -> bool:
            return all(self[name].generation == generation and self[name].step >= steps for name in names)

        self.wait(all_step)
        assert {self[name].joined[-1].world_size for name in names} == {len(names)}
        assert sorted(self[name].joined[-1].rank for name in names) == list(range(len(names)))


@contextmanager
def team(folder: Path, *names: str, sizes: tuple[int, ...] = (), host: str = "127.0.0.1", links: Links = network,
         **elastic: Any) -> Iterator[Team]:
    """Yield a coordinator with workers that have begun to train.

    Args:
        folder: folder of the run.
        names: the workers.
        sizes: legal numbers of workers; default: all up to the number of workers.
        host: address at which the coordinator listens.
        links: makes the network of a worker.
        elastic: settings of `ElasticConfig`.
    """
    sizes = sizes or tuple(range(1, len(names) + 1))
    settings = ElasticConfig(min_workers=min(sizes), max_workers=max(sizes), **elastic)
    coordinator = Coordinator(str(folder), settings, sizes, epoch=acquire(store(str(folder))).epoch)
    coordinator._needs_store = False  # type: ignore[assignment]  # torch's; these workers meet elsewhere
    coordinator.start(host)
    with ExitStack() as stack:
        group = Team(folder, coordinator, stack, links)
        try:
            group.add(*names, anew=True)
            group.wait(lambda: sum(worker.step >= 2 for worker in group.workers.values()) >= max(sizes))
            yield group
        finally:
            for worker in group.workers.values():
                worker.close()
            coordinator.end()
