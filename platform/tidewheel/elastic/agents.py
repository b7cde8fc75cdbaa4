"""The memory agents of a run, one on each node: Ray actors that outlive workers and driver, but not their raylet."""

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
    """A `checkpoint.memory_tier.agent.Agent` in a process of its own. Ray reserves no CPU for it."""

    def __init__(self, run: str, token: str) -> None:
        import ray

        from tidewheel.checkpoint.memory_tier.agent import NICENESS, Agent

        self._token = token
        os.nice(NICENESS)
        # it ends by itself when it is no longer needed; Ray frees the actor's name when the process ends
        self._agent = Agent(ray.util.get_node_ip_address(), token, run, on_stop=_leave)

    def where(self) -> tuple[tuple[str, int], str]:
        """Return the agent's address and the run's token."""
        return tuple(self._agent.address), self._token  # type: ignore[return-value]


def _leave() -> None:
    """End the process, unless the driver that stopped the agent ends it before, which Ray counts as an orderly end."""
    time.sleep(LEAVE_SECONDS)
    os._exit(0)


class Agents:
    """The agents of a run. A driver that resumes the run finds them again, with their snapshots.

    Args:
        run_uri: the run's folder.
    """

    def __init__(self, run_uri: str) -> None:
        self._run = hashlib.sha256(run_uri.encode()).hexdigest()[:16]
        self._actors: dict[str, Any] = {}
        self._addresses: dict[str, Address] = {}
        self._token = ""

    @property
    def token(self) -> str:
        """Secret by which workers authenticate to the agents; never log it."""
        return self._token

    def on(self, node_ids: Iterable[str], seconds: float = START_SECONDS) -> dict[str, Address]:
        """Return the agents of these nodes by node id, and start those that are missing.

        A node whose agent does not respond within `seconds` is left out: it is dying, or has no shared memory.
        """
        requested = sorted(set(node_ids))
        if not self._token:
            self._adopt(requested, seconds)
            self._token = self._token or secrets.token_hex(32)
        for node_id in requested:
            if node_id not in self._actors:
                self._actors[node_id] = self._start(node_id)
        self._locate([node_id for node_id in requested if node_id not in self._addresses], seconds)
        return {node_id: self._addresses[node_id] for node_id in requested if node_id in self._addresses}

    def lost(self, node_id: str) -> None:
        """Forget the agent of a node: it or its node is gone. `on` starts a new one."""
        self._actors.pop(node_id, None)
        self._addresses.pop(node_id, None)

    def stop(self) -> None:
        """End all agents and delete their snapshots: the run is over."""
        import ray

        from tidewheel.checkpoint.memory_tier.protocol import connect
        from tidewheel.checkpoint.memory_tier.slots import sweep

        for node_id, actor in self._actors.items():
            if node_id in self._addresses:
                with contextlib.suppress(OSError):  # it is gone already, or is ending
                    connection = connect(self._addresses[node_id], self._token)
                    connection.ask({"op": "stop"})
                    connection.receive()  # returns when the agent has deleted everything and closes
            ray.kill(actor)
        self._actors, self._addresses = {}, {}
        sweep()  # snapshots of killed nodes, where one machine has several nodes

    def abandon(self) -> None:
        """Let the agents upload the newest step at once: the driver ends, though the run is not over."""
        from tidewheel.checkpoint.memory_tier.inventory import ask

        for address in self._addresses.values():
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
        """Find the agents that an earlier driver of the run started."""
        import ray

        for node_id in node_ids:
            with contextlib.suppress(ValueError):  # no agent runs there
                self._actors[node_id] = ray.get_actor(self._name(node_id), namespace=NAMESPACE)
        self._locate(list(self._actors), seconds)

    def _locate(self, node_ids: list[str], seconds: float) -> None:
        import ray

        answers = {node_id: self._actors[node_id].where.remote() for node_id in node_ids if node_id in self._actors}
        ready, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=seconds) if answers else ([], [])
        for node_id, answer in answers.items():
            try:
                if answer not in ready:
                    raise ray.exceptions.GetTimeoutError(f"the agent on node {node_id} does not respond")
                address, token = ray.get(answer)
            except ray.exceptions.RayError:
                self.lost(node_id)  # the caller sees that it is missing
                continue
            if self._token and token != self._token:
                ray.kill(self._actors[node_id])  # of another driver that started at the same time
                self.lost(node_id)
                continue
            self._token, self._addresses[node_id] = token, Address(*address)
