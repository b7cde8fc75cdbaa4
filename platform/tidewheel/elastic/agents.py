"""One memory agent on each node of the run, as a Ray actor that outlives workers and driver, but not its raylet."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterable
from typing import Any

from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.elastic.nodes import NAMESPACE

START_SECONDS, LEAVE_SECONDS = 30.0, 2.0


class AgentActor:
    """A `checkpoint.memory_tier.agent.Agent` in a process of its own. It takes no CPU in Ray's books."""

    def __init__(self, run: str, token: str) -> None:
        import ray

        from tidewheel.checkpoint.memory_tier.agent import NICENESS, Agent

        self._token = token
        os.nice(NICENESS)
        # it ends by itself when nobody needs it any more; only the whole process takes the actor's name with it
        self._agent = Agent(ray.util.get_node_ip_address(), token, run, on_stop=_leave)

    def where(self) -> tuple[tuple[str, int], str]:
        """(address, the run's token)."""
        return tuple(self._agent.address), self._token  # type: ignore[return-value]


def _leave() -> None:
    """End the process, unless who stopped the agent does so before: Ray takes only that for an orderly end."""
    time.sleep(LEAVE_SECONDS)
    os._exit(0)


class Agents:
    """The agents of a run. They are found again, with what they hold, by a driver that takes the run up.

    Args:
        run_uri: the run's folder.
    """

    def __init__(self, run_uri: str) -> None:
        self._run = hashlib.sha256(run_uri.encode()).hexdigest()[:16]
        self._actors: dict[str, Any] = {}
        self._found: dict[str, Address] = {}
        self._token = ""

    @property
    def token(self) -> str:
        """What workers prove to the agents that they know; never to be logged."""
        return self._token

    def on(self, node_ids: Iterable[str], seconds: float = START_SECONDS) -> dict[str, Address]:
        """The agents of these nodes by node id, started where there is none; all at once.

        A node whose agent does not answer within `seconds` is not in the answer: it is dying, or has no shared memory.
        """
        wanted = sorted(set(node_ids))
        if not self._token:
            self._adopt(wanted, seconds)
            self._token = self._token or secrets.token_hex(32)
        for node_id in wanted:
            if node_id not in self._actors:
                self._actors[node_id] = self._start(node_id)
        self._ask([node_id for node_id in wanted if node_id not in self._found], seconds)
        return {node_id: self._found[node_id] for node_id in wanted if node_id in self._found}

    def lost(self, node_id: str) -> None:
        """The node or its agent is gone; asked for again, it is started anew."""
        self._actors.pop(node_id, None)
        self._found.pop(node_id, None)

    def stop(self) -> None:
        """The run is over: end them all, and what they hold."""
        import ray

        from tidewheel.checkpoint.memory_tier.protocol import connect
        from tidewheel.checkpoint.memory_tier.slots import sweep

        for node_id, actor in self._actors.items():
            if node_id in self._found:
                with contextlib.suppress(OSError):  # it is gone already, or goes as it shall
                    connection = connect(self._found[node_id], self._token)
                    connection.ask({"op": "stop"})
                    connection.receive()  # nothing comes: it closes when it has deleted everything
            ray.kill(actor)
        self._actors, self._found = {}, {}
        sweep()  # of nodes that were killed, where several are on one machine

    def abandon(self) -> None:
        """The driver ends and the run is not over: they need not wait for workers before they upload what is left."""
        from tidewheel.checkpoint.memory_tier.inventory import ask

        for address in self._found.values():
            ask(address, self._token, {"op": "abandon"})

    def _name(self, node_id: str) -> str:
        return f"memory-{self._run}-{node_id}"

    def _start(self, node_id: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote: Any = ray.remote(AgentActor)
        return remote.options(
            name=self._name(node_id), namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
            max_concurrency=4, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(self._run, self._token)

    def _adopt(self, node_ids: list[str], seconds: float) -> None:
        """Those that an earlier driver of the run has started."""
        import ray

        for node_id in node_ids:
            with contextlib.suppress(ValueError):  # there is none
                self._actors[node_id] = ray.get_actor(self._name(node_id), namespace=NAMESPACE)
        self._ask(list(self._actors), seconds)

    def _ask(self, node_ids: list[str], seconds: float) -> None:
        import ray

        answers = {node_id: self._actors[node_id].where.remote() for node_id in node_ids if node_id in self._actors}
        ready, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=seconds) if answers else ([], [])
        for node_id, answer in answers.items():
            try:
                if answer not in ready:
                    raise ray.exceptions.GetTimeoutError(f"the agent on node {node_id} does not answer")
                address, token = ray.get(answer)
            except ray.exceptions.RayError:
                self.lost(node_id)  # the node goes without; the caller sees that it is not in the answer
                continue
            if self._token and token != self._token:
                ray.kill(self._actors[node_id])  # of yet another driver: it started while we did
                self.lost(node_id)
                continue
            self._token, self._found[node_id] = token, Address(*address)
