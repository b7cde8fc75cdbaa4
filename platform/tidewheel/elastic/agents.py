"""The memory agents of a run, one on each node: Ray actors that outlive workers and driver, but not their raylet."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.node_relay import NodeRelay
from tidewheel.elastic.nodes import NAMESPACE
from tidewheel.elastic.process_log import LogTarget, ProcessLog
from tidewheel.errors import OwnershipError

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
LEAVE_SECONDS = 2.0
AT_ONCE = 64
"""Agents that are asked to end at a time."""
LOG_SECONDS = 5.0
"""Time for all agents to write the last lines of their logs."""


class CurrentRelay:
    """The relay of a node to the coordinator of the newest epoch.

    Args:
        host: address of the node.
        node: id of the node.
    """

    def __init__(self, host: str, node: str) -> None:
        self._host = host
        self._node = node
        self._endpoint: Endpoint | None = None
        self._relay: NodeRelay | None = None
        self._lock = threading.Lock()

    def to(self, endpoint: Endpoint) -> tuple[str, int]:
        """Return the address of the relay to a coordinator; start it if need be.

        The relay to an earlier coordinator ends. If that was of an older epoch, the relay tells its workers to end.

        Args:
            endpoint: where the coordinator listens.

        Raises:
            OwnershipError: the coordinator of a newer epoch has a relay here.
        """
        with self._lock:
            former = self._endpoint
            if former is not None and endpoint.epoch < former.epoch:
                raise OwnershipError(f"the run was taken over: this node has a relay of epoch {former.epoch}",
                                     where=endpoint.run, fix="nothing to do: the newer epoch's driver trains the run")
            if self._relay is None or former is None or former.address != endpoint.address or not self._relay.runs:
                if self._relay is not None and former is not None and endpoint.epoch > former.epoch:
                    self._relay.dismiss(f"the run was taken over (epoch {endpoint.epoch})")
                elif self._relay is not None:
                    self._relay.stop()
                relay = NodeRelay(self._host, endpoint, self._node, lambda: logger.info("the relay ends"))
                relay.start()
                self._relay = relay
                self._endpoint = endpoint
            return self._relay.address


class AgentActor:
    """An actor that runs a `checkpoint.memory_tier.agent.Agent`. Ray reserves no CPU for it.

    Args:
        run: hash of the run's URI, in the names of its shared memory.
        token: secret by which workers authenticate.
        log: run whose logs/ gets the agent's log; None to keep none.
        node: id of the agent's node, for the log.
        disk: see `Agent`.
    """

    def __init__(self, run: str, token: str, log: LogTarget | None = None, node: str = "",
                 disk: tuple[Path, int] | None = None) -> None:
        import ray

        from tidewheel.checkpoint.memory_tier.agent import NICENESS, Agent

        self._token = token
        self._host = ray.util.get_node_ip_address()
        self._relay = CurrentRelay(self._host, node)
        self._log = ProcessLog(log, "agent", node)
        os.nice(NICENESS)
        # the agent stops when it is no longer needed; Ray frees the actor's name when the process ends
        self._agent = Agent(self._host, token, run, on_stop=self._leave, disk=disk)
        logger.info("the memory agent of node %s listens at %s:%d", node, *self._agent.address)

    def where(self) -> tuple[tuple[str, int], str]:
        """Return the agent's address and the run's token."""
        return tuple(self._agent.address), self._token  # type: ignore[return-value]

    def relay(self, endpoint: Endpoint) -> tuple[str, int]:
        """Return where the workers of the node connect so that they share one connection to the coordinator."""
        return self._relay.to(endpoint)

    def close_log(self) -> None:
        """Write the last lines of the agent's log."""
        self._log.close()

    def _leave(self) -> None:
        """End the process. If the driver kills the actor first, Ray does not report a failure."""
        logger.info("the memory agent ends")
        self._log.close()
        time.sleep(LEAVE_SECONDS)
        os._exit(0)


class Agents:
    """The agents of a run. A driver that resumes the run finds them again, with their snapshots.

    Args:
        run_uri: the run's folder.
        log: run whose logs/ gets the logs of the agents; None to keep none.
        disk: folder on the nodes' local disks, and the most bytes in it; None: snapshots stay in memory.
    """

    def __init__(self, run_uri: str, log: LogTarget | None = None, disk: tuple[Path, int] | None = None) -> None:
        self._log, self._disk = log, disk
        self._run = hashlib.sha256(run_uri.encode()).hexdigest()[:16]
        self._actors: dict[str, Any] = {}
        self._addresses: dict[str, Address] = {}
        self._token = ""

    @property
    def token(self) -> str:
        """Secret by which workers authenticate to the agents; never log it."""
        return self._token

    def on(self, node_ids: Iterable[str], seconds: float = START_SECONDS) -> dict[str, Address]:
        """Return the agents of these nodes by node id, and start missing agents.

        The first call adopts the agents of the run's former driver, on other nodes too: they may hold the newest step.
        A node whose agent does not respond within `seconds` is left out: it is dying, or has no shared memory.
        """
        requested = sorted(set(node_ids))
        if not self._token:
            self._adopt(seconds)
            self._token = self._token or secrets.token_hex(32)
        for node_id in requested:
            if node_id not in self._actors:
                self._actors[node_id] = self._start(node_id)
        self._locate([node_id for node_id in requested if node_id not in self._addresses], seconds)
        return {node_id: self._addresses[node_id] for node_id in requested if node_id in self._addresses}

    def known(self) -> dict[str, Address]:
        """Return all agents that have answered, by node id, adopted ones too."""
        return dict(self._addresses)

    def relays(self, node_ids: Iterable[str], endpoint: Endpoint,
               seconds: float = START_SECONDS) -> dict[str, tuple[str, int]]:
        """Return where the workers of these nodes connect, by node id, and start missing relays.

        Args:
            node_ids: nodes with an agent.
            endpoint: where the coordinator listens.
            seconds: leave out a node whose agent does not respond in this time.
        """
        import ray

        answers = {node_id: self._actors[node_id].relay.remote(endpoint) for node_id in node_ids
                   if node_id in self._actors}
        ready, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=seconds) if answers else ([], [])
        answered = set(ready)
        addresses: dict[str, tuple[str, int]] = {}
        for node_id, answer in answers.items():
            if answer in answered:
                try:
                    addresses[node_id] = tuple(ray.get(answer))
                except ray.exceptions.RayError as error:  # its workers connect directly
                    logger.warning("node %s has no relay: %s", node_id, error)
        return addresses

    def lost(self, node_id: str) -> None:
        """Forget the agent of a node: it or its node is gone. `on` starts a new one."""
        self._actors.pop(node_id, None)
        self._addresses.pop(node_id, None)

    def stop(self) -> None:
        """End all agents and delete their snapshots: the run is over."""
        import ray

        from tidewheel.checkpoint.memory_tier.slots import sweep

        self._at_all(self._stop_one)
        closing = [actor.close_log.remote() for actor in self._actors.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=LOG_SECONDS)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors, self._addresses = {}, {}
        sweep()  # snapshots of killed nodes, where one machine has several nodes

    def abandon(self) -> None:
        """Make the agents upload the newest step at once: the driver ends before the run is over."""
        from tidewheel.checkpoint.memory_tier.inventory import ask

        self._at_all(lambda address: ask(address, self._token, {"op": "abandon"}))

    def _at_all(self, function: Callable[[Address], object]) -> None:
        """Call a function with the address of each agent, many at a time: the driver waits only seconds for all."""
        addresses = list(self._addresses.values())
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="agents") as pool:
            list(pool.map(function, addresses))

    def _stop_one(self, address: Address) -> None:
        """Stop an agent, and wait until it has deleted everything, at which it closes the connection."""
        from tidewheel.checkpoint.memory_tier.protocol import connect

        # an error means that the agent has ended, or is ending
        with contextlib.suppress(OSError), contextlib.closing(connect(address, self._token)) as connection:
            connection.ask({"op": "stop"})
            connection.receive()

    @property
    def _prefix(self) -> str:
        return f"memory-{self._run}-"

    def _name(self, node_id: str) -> str:
        return self._prefix + node_id

    def _start(self, node_id: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote: Any = ray.remote(AgentActor)
        return remote.options(
            name=self._name(node_id), namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
            max_concurrency=4, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(self._run, self._token, self._log, node_id, self._disk)

    def _adopt(self, seconds: float) -> None:
        """Find the agents that an earlier driver of the run started, on whatever node."""
        import ray

        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] != NAMESPACE or not actor["name"].startswith(self._prefix):
                continue
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                self._actors[actor["name"].removeprefix(self._prefix)] = ray.get_actor(actor["name"],
                                                                                       namespace=NAMESPACE)
        self._locate(list(self._actors), seconds)

    def _locate(self, node_ids: list[str], seconds: float) -> None:
        import ray

        answers = {node_id: self._actors[node_id].where.remote() for node_id in node_ids if node_id in self._actors}
        ready, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=seconds) if answers else ([], [])
        answered = set(ready)
        for node_id, answer in answers.items():
            try:
                if answer not in answered:
                    raise ray.exceptions.GetTimeoutError(f"the agent on node {node_id} does not respond")
                address, token = ray.get(answer)
            except ray.exceptions.RayError:
                self.lost(node_id)  # the caller sees that it is missing
                continue
            if self._token and token != self._token:
                ray.kill(self._actors[node_id])  # of another driver that started at the same time
                self.lost(node_id)
                continue
            self._token = token
            self._addresses[node_id] = Address(*address)
