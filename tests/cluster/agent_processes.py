"""Memory agents in processes of their own, without Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.agent_addresses import AgentAddresses
from tidewheel.checkpoint.memory_tier import inventory, part_reader
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.protocol import Address

ANSWER_SECONDS = 300.0


def _agent(address: Any, token: str, folder: Path | None) -> None:
    agent = Agent("127.0.0.1", token, "processes", disk=None if folder is None else (folder, 0))
    address.send(tuple(agent.address))
    agent.stopped.wait()


def ask_patiently(node: str, path: Path) -> None:
    """Let a worker wait for agents on a busy machine; a dead one still refuses at once.

    Args:
        node: the worker's; not used.
        path: not used.
    """
    part_reader.ASK_SECONDS = part_reader.READ_SECONDS = ANSWER_SECONDS
    for function in (inventory.inventory, inventory.ask):
        assert function.__kwdefaults__ is not None
        function.__kwdefaults__["seconds"] = ANSWER_SECONDS


class AgentProcesses(AgentAddresses):
    """Agents, one for each node.

    Args:
        disks: has a folder for each node's local disk; None: there are no disks.
    """

    def __init__(self, disks: Path | None = None) -> None:
        self._disks = disks
        self._processes: dict[str, Any] = {}
        self._addresses: dict[str, Address] = {}

    def on(self, nodes: Iterable[str], seconds: float) -> dict[str, Address]:
        context = multiprocessing.get_context("forkserver")
        for node in set(nodes) - self._addresses.keys():
            ours, theirs = context.Pipe()
            disk = None if self._disks is None else self._disks / node
            process = context.Process(target=_agent, args=(theirs, self.token, disk), daemon=True)
            process.start()
            self._processes[node], self._addresses[node] = process, Address(*ours.recv())
        return {node: self._addresses[node] for node in nodes}

    def kill(self, *nodes: str) -> None:
        """Kill the agents of some nodes, by default of all, as a power cut does."""
        for node in nodes or tuple(self._processes):
            process = self._processes.pop(node)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
