"""Agents and workers as processes of their own, to be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tests.ranks  # noqa: F401  the fork server has torch
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.client import MemoryTier
from tidewheel.checkpoint.memory_tier.protocol import Address

TOKEN = "secret"
RUN = f"killed-{os.getpid()}"
"""Name of the run, which the folders of its agents have. Other tests on this machine have other ones."""
CONTEXT = multiprocessing.get_context("forkserver")
ELEMENTS = 1 << 20


def part(step: int, rank: int) -> dict[str, Any]:
    """The state of a rank at a step, 5 MB; each rank has tensors of its own, as in a pipeline."""
    base = torch.arange(ELEMENTS, dtype=torch.float32)
    return {"model": {f"{rank}.weight": base + step, f"{rank}.bias": torch.full((7,), float(step))},
            "optimizer": {f"{rank}.moment": torch.full((1000, 300), float(step * (rank + 1)))}}


def whole(step: int, world_size: int) -> dict[str, Any]:
    """The parts of all ranks."""
    parts = [part(step, rank) for rank in range(world_size)]
    return {group: {name: tensor for item in parts for name, tensor in item[group].items()} for group in parts[0]}


def _agent(address: Any, run: str) -> None:
    agent = Agent("127.0.0.1", TOKEN, run)
    address.send(tuple(agent.address))
    agent.stopped.wait()


def _train(agents: list[Address], rank: int, generation: int, first: int, barrier: Any, done: Any) -> None:
    torch.set_num_threads(1)
    world_size = len(agents)
    tier = MemoryTier(dict(enumerate(agents)), agents[rank], agents[rank + 1:] + agents[:rank], rank, world_size, TOKEN,
                      generation=generation)
    for step in range(first, first + 100_000):
        state = part(step, rank)
        barrier.wait()  # as the all-reduce of a step
        tier.settle()
        done.value = step - 1
        tier.snapshot(step, state, {"step": step})


@dataclass
class Killable:
    """A process that is killed without notice."""

    process: Any

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@dataclass
class AgentProcess(Killable):
    """An agent."""

    address: Address

    @classmethod
    def start(cls) -> AgentProcess:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_agent, args=(theirs, RUN), daemon=True)
        process.start()
        return cls(process, Address(*ours.recv()))

    def freeze(self) -> None:
        """Stop it, and wait until all its threads stand still: the signal only asks for that."""
        os.kill(self.process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        until = time.monotonic() + 60
        while any(file.read_text().rpartition(")")[2].split()[0] != "T" for file in tasks.glob("*/stat")):
            assert time.monotonic() < until
            time.sleep(0.01)


@dataclass
class Trainer(Killable):
    """A worker that does nothing but snapshots."""

    done: Any

    @classmethod
    def start(cls, agents: list[Address], rank: int, generation: int, first: int, barrier: Any) -> Trainer:
        done = CONTEXT.Value("q", first - 1)
        process = CONTEXT.Process(target=_train, args=(agents, rank, generation, first, barrier, done), daemon=True)
        process.start()
        return cls(process, done)
