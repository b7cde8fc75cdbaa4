"""Workers of `storm` without torch: connections that speak the real protocol and take steps of a stated length.

All workers are in this process, so that the ranks of a generation meet without a store: a generation begins its first
step when all its ranks have joined and `rebuild` seconds have passed, and its step ends when rank 0 reports it. The
parent process sends commands as JSON lines to the standard input and reads reports from the output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.control_plane_clients import Clients, Worker, run, say
from tidewheel.elastic.messages import ExitReason, Left, StepDone

STEPS = 1_000_000
"""Steps of the whole run: it never ends by itself."""


@dataclass
class Counts:
    """What happened to the steps, and how many ranks there were."""

    attempted: int = 0
    """Steps that began."""
    committed: int = 0
    """Steps that rank 0 reported."""
    stepping: float = 0.0
    """Seconds inside steps."""
    rank_seconds: float = 0.0
    """Ranks of the running generation, summed over the seconds in which it existed."""


@dataclass
class Group:
    """The ranks of one generation."""

    number: int
    world_size: int
    members: list[Steps] = field(default_factory=list)
    step_began: float | None = None
    stepped: bool = False
    """Its first step has begun."""
    stop: bool = False
    over: bool = False
    began: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Steps(Worker):
    """A worker that takes steps with the others of its generation."""

    def __init__(self, name: str, node: str, clients: StormClients) -> None:
        super().__init__(name, node, clients)
        self._storm = clients

    def leave(self, reason: ExitReason) -> None:
        """Report that this worker has left its generation."""
        if self.left or self.dead:
            return
        self.left = True
        if reason is ExitReason.PREEMPTED:
            self._send(Left(self.generation, reason, saved_step=self._storm.step))
        else:
            self._send(Left(self.generation, reason, "RuntimeError: connection closed by peer"))

    def step_done(self, step: int) -> None:
        """Report a step as rank 0 does."""
        self._send(StepDone(self.generation, step, STEPS, {}))

    def _act(self, body: dict[str, Any]) -> None:
        if body["type"] == "welcome":
            self._welcome += 1
        elif body["type"] == "join":
            self.generation = body["generation"]
            self.left = False
            self._storm.take_in(self, body)
        elif body["type"] == "abort":
            self._clients.totals.aborts += 1
            self._aborted = max(self._aborted, body["generation"])
            if self.generation <= self._aborted:
                self._storm.broken(self.generation)
                self.leave(ExitReason.FAILED)
        elif body["type"] in ("stop", "go_on"):
            self._storm.ask(body["generation"], body["type"] == "stop")


class StormClients(Clients):
    """All workers, and the generation in which they train.

    Args:
        token: the run's token.
        names: node by worker.
        full_step: seconds of a step with `full_size` ranks. Fewer ranks take proportionally longer, because the global
            batch is the same.
        full_size: largest number of ranks.
        rebuild: seconds from the last rank's join until the first step begins.
    """

    def __init__(self, token: str, names: dict[str, str], *, full_step: float, full_size: int, rebuild: float) -> None:
        super().__init__(token, {}, 0.0)
        self.workers = {name: Steps(name, node, self) for name, node in names.items()}
        self.step = 0
        self.counts = Counts()
        self._full_step = full_step
        self._full_size = full_size
        self._rebuild = rebuild
        self._address = ("", 0)
        self._group: Group | None = None
        self._starting: set[asyncio.Task[Any]] = set()

    async def connect(self, host: str, port: int) -> None:
        """Connect all workers."""
        self._address = (host, port)
        await super().connect(host, port)

    def take_in(self, worker: Steps, body: dict[str, Any]) -> None:
        """Note that a worker has joined a generation."""
        group = self._group
        self._beat = body["beat_seconds"]
        if group is None or group.number < body["generation"]:
            if group is not None:
                self.broken(group.number)
            group = self._group = Group(body["generation"], body["world_size"], began=time.monotonic())
        if group.number != body["generation"] or group.over:
            return
        if body["rank"] == 0:
            group.members.insert(0, worker)
        else:
            group.members.append(worker)
        if len(group.members) == group.world_size:
            say({"formed": group.number, "size": group.world_size, "at": time.monotonic(),
                 "nodes": sorted({member.node for member in group.members})})
            group.timer = asyncio.get_running_loop().call_later(self._rebuild, self._begin_step, group)

    def broken(self, number: int) -> None:
        """End a generation: its step in progress is lost."""
        group = self._group
        if group is None or group.number != number or group.over:
            return
        now = time.monotonic()
        group.over = True
        self.counts.rank_seconds += group.world_size * (now - group.began)
        if group.timer is not None:
            group.timer.cancel()
        if group.step_began is not None:
            self.counts.stepping += now - group.step_began

    def ask(self, number: int, stop: bool) -> None:
        """Let the members leave at the next step boundary, or not after all."""
        if self._group is not None and self._group.number == number:
            self._group.stop = stop

    def obey(self, command: dict[str, Any]) -> None:
        """Act on a command of the parent."""
        for name in command.get("die", ()):
            worker = self.workers.pop(name, None)
            if worker is not None:
                worker.die()
                if worker.generation == getattr(self._group, "number", None) and not worker.left:
                    self._lose_step()
        for name, node in command.get("start", {}).items():
            worker = self.workers[name] = Steps(name, node, self)
            task = asyncio.get_running_loop().create_task(self._start(worker))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        if "rewind" in command:
            self.step = command["rewind"]
        if command.get("report"):
            running = self._group
            ranks = self.counts.rank_seconds
            if running is not None and not running.over:
                ranks += running.world_size * (time.monotonic() - running.began)
            say({"report": {**vars(self.counts), "rank_seconds": ranks, "cut": self.totals.cut}})

    async def _start(self, worker: Worker) -> None:
        await asyncio.get_running_loop().create_connection(lambda: worker, *self._address)

    def _begin_step(self, group: Group) -> None:
        if group.over:
            return
        if not group.stepped:
            group.stepped = True
            say({"loaded": group.number})
        self.counts.attempted += 1
        group.step_began = time.monotonic()
        seconds = self._full_step * self._full_size / group.world_size
        group.timer = asyncio.get_running_loop().call_later(seconds, self._end_step, group)

    def _lose_step(self) -> None:
        """Stop the step: the gradients of a member that died are missing. The others wait until they are told."""
        group = self._group
        if group is not None and group.timer is not None:
            group.timer.cancel()

    def _end_step(self, group: Group) -> None:
        assert group.step_began is not None
        self.counts.committed += 1
        self.counts.stepping += time.monotonic() - group.step_began
        group.step_began = None
        self.step += 1
        group.members[0].step_done(self.step)
        say({"step": self.step})
        if not group.stop:
            self._begin_step(group)
            return
        self.broken(group.number)
        for worker in group.members:
            worker.leave(ExitReason.PREEMPTED)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("host")
    options.add_argument("port", type=int)
    given = options.parse_args()
    setup = json.loads(sys.stdin.readline())
    clients = StormClients(setup["token"], setup["names"], full_step=setup["full_step"],
                           full_size=setup["full_size"], rebuild=setup["rebuild"])
    asyncio.run(run(clients, given.host, given.port))


if __name__ == "__main__":
    main()
