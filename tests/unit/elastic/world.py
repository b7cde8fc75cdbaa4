"""A membership that records what it sends, and a clock that the tests advance."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tidewheel.elastic.blame import Blame
from tidewheel.elastic.generation import Generation, Limits
from tidewheel.elastic.membership import Membership
from tidewheel.elastic.messages import CoordinatorMessage, ExitReason, Join, Left
from tidewheel.elastic.policy import Backoff, FailureBudget, Resizer

LIMITS = Limits(heartbeat=3, leave=5, start=60, gather=120)
READMIT = Backoff(60, 240)


class World:
    """A membership, the messages and events that it sends, and a clock."""

    def __init__(self, sizes: tuple[int, ...] = (1, 2, 4), tensor: int = 1, **budget: Any) -> None:
        self.now, self.sent, self.fenced, self.events = 100.0, [], [], []
        self.asked = []
        self.deaf_since: dict[str, float] = {}  # when a message to a worker was not acknowledged
        self.healthy = False  # True: workers pass every probe at once
        resizer = Resizer(sizes, join_wait_seconds=1, interval_seconds=2, answer_seconds=30)
        self.membership = Membership(sizes, resizer, FailureBudget(**budget), self, limits=LIMITS,
                                     blame=Blame(READMIT), tensor=tensor)

    def send(self, worker: str, message: CoordinatorMessage) -> None:
        self.sent.append((worker, message))
        if message.type == "probe" and self.healthy:
            self.asked.append(worker)

    def send_all(self, workers: Collection[str], message: CoordinatorMessage) -> None:
        for worker in workers:
            self.send(worker, message)

    def fence(self, worker: str) -> None:
        self.fenced.append(worker)

    def unheard(self, worker: str) -> float:
        return self.now - self.deaf_since.get(worker, self.now)

    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        self.events.append((kind, detail))

    def form(self, generation: Generation) -> None:
        for rank, name in enumerate(generation.members):
            self.send(name, Join(generation.number, rank, len(generation.members)))

    def start(self, *names: str) -> None:
        self.membership.expect(names, self.now, anew=True)
        self.come(*names)

    def come(self, *names: str, spot: bool = False, node: str = "", device: str = "") -> None:
        for name in names:
            self.membership.hello(name, node or f"node of {name}", self.now, spot=spot, device=device)

    def run(self, step: int) -> None:
        for name in self.members:
            self.membership.beat(name, self.number, step, self.now)

    def leave(self, *names: str, reason: ExitReason = ExitReason.FAILED, text: str = "connection closed",
              kind: str = "", saved_step: int | None = None) -> None:
        for name in names:
            self.membership.left([name], Left(self.number, reason, text, kind, saved_step=saved_step), self.now)

    def fail(self, name: str, text: str = "RuntimeError: CUDA error: uncorrectable ECC error") -> None:
        """Let one member raise an error; the other members leave because of it."""
        members = self.members
        self.leave(name, text=text, kind=text.partition(":")[0])
        self.leave(*[member for member in members if member != name])

    def lose(self, *names: str) -> None:
        for name in names:
            self.membership.lost(name, f"{name} died", self.now)

    def wait(self, seconds: float, *alive: str, at_work: str = "") -> None:
        """Let time pass while the workers in `alive` send beats.

        The worker `at_work` has received the message that its generation ends, and still computes.
        """
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            for name in alive:
                self.membership.beat(name, self.number, 0, self.now, work=self.now if name == at_work else 0.0,
                             aborts=self.number if name == at_work else -1)
            self.membership.tick(self.now)
            while self.asked:
                self.membership.probed(self.asked.pop(), "", self.now)

    @property
    def number(self) -> int:
        return self.membership.generation.number if self.membership.generation else -1

    @property
    def members(self) -> tuple[str, ...]:
        return self.membership.generation.members if self.membership.generation else ()

    def take_receivers(self, message_type: str) -> list[str]:
        """Return the workers that were sent messages of a type, and forget those messages."""
        workers = [worker for worker, message in self.sent if message.type == message_type]
        self.sent = [(worker, message) for worker, message in self.sent if message.type != message_type]
        return workers

    def details(self, kind: str) -> list[dict[str, Any]]:
        return [detail for recorded, detail in self.events if recorded == kind]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]
