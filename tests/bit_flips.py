"""Flip bits in a run's weights, optimizer state, gradients, activations and data, as failing hardware does."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tidewheel.train import parallel
from tidewheel.train.config import TrainConfig
from tidewheel.train.guards.hang import Watch
from tidewheel.train.guards.policy import Guard
from tidewheel.train.guards.recomputation import Recomputation
from tidewheel.train.guards.verdict import SilentCorruptionError
from tidewheel.train.parallel import ParallelModel, local
from tidewheel.train.reproducible.exchange import OrderedSum
from tidewheel.train.run import Run
from tidewheel.train.runtime import NoControl, Runtime
from tidewheel.train.step import MicroBatch, start_step
from tidewheel.train.storage_wait import StorageWait
from tidewheel.train.timeline import Timeline, ledger
from tidewheel.train.training import Training

STATE = ("weights", "optimizer")
PLACES = (*STATE, "gradient", "activation", "data")
TOKEN_BITS = 6
"""Lower bits of a token, which flip into other tokens of the tests' vocabulary."""


@torch.no_grad()
def flip(tensor: torch.Tensor, random: random.Random, bits: int = 32) -> str:
    """Flip one random bit of a tensor in place; return where.

    Args:
        tensor: contiguous, fp32 or int64.
        random: chooses the element and the bit.
        bits: of the lower ones one is chosen.
    """
    words = tensor.view(-1).view(torch.int32)
    width = tensor.element_size() // 4
    element, bit = random.randrange(tensor.numel()), random.randrange(bits)
    mask = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    words[element * width] ^= mask
    return f"bit {bit} of element {element}"


@contextlib.contextmanager
def wrong_gradient(random: random.Random, calls: int) -> Iterator[None]:
    """Flip a bit in one of the gradients of micro-batches that are computed in the block.

    Args:
        random: chooses which.
        calls: gradients that the block computes: micro-batches x buckets or units.
    """
    real, chosen, count = OrderedSum.add, random.randrange(calls), 0

    def add(self: OrderedSum, *flats: torch.Tensor) -> None:
        nonlocal count
        if count == chosen:
            flip(flats[0], random)
        count += 1
        real(self, *flats)

    OrderedSum.add = add  # type: ignore[method-assign]
    try:
        yield
    finally:
        OrderedSum.add = real  # type: ignore[method-assign]


@contextlib.contextmanager
def wrong_activation(model: ParallelModel, random: random.Random, micro_batches: int) -> Iterator[None]:
    """Flip a bit in one output of a linear layer in the block.

    Args:
        model: this rank's part of the model.
        random: chooses the layer, the micro-batch and the bit.
        micro_batches: that the block computes.
    """
    layers = [module for part in model.parts for module in part.modules() if isinstance(module, torch.nn.Linear)]
    chosen, count = random.randrange(micro_batches), 0

    def wrong(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal count
        count += 1
        if count != chosen + 1:
            return None
        changed = output.clone()
        flip(changed, random)
        return changed

    handle = random.choice(layers).register_forward_hook(wrong)
    try:
        yield
    finally:
        handle.remove()


class Script(NoControl):
    """Keeps the events of a run."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, **detail: Any) -> None:
        self.events.append((kind, detail))


class Rig:
    """One rank of a run that is trained step by step, without the loop, with faults on chosen ranks.

    All ranks make the same calls.

    Args:
        config: of the run.
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, config: TrainConfig, rank: int = 0, world_size: int = 1) -> None:
        self.control = Script()
        runtime = Runtime(rank, world_size, control=self.control, node=f"node {rank}")
        run = Run.open(config)
        self.training = Training.open(run, runtime, Timeline(ledger(run.store, runtime), runtime, time.time()),
                                      Watch(config.guards, rank, world_size), StorageWait.of(config, runtime))
        parallel.init_weights(self.training.model, config.seed)
        self.training.optimizer.started()
        self.guard = Guard(config.guards, self.training.device)
        self.checks = Recomputation(self.training, self.guard)
        self.checked = False
        """Whether the newest step was one that is checked."""
        self.step = 0
        self._tensors = [local(tensor) for group in self.training.state().values() for tensor in group.values()]
        self._good = [tensor.clone() for tensor in self._tensors]

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        return self.training.runtime.rank

    def train(self, place: str = "", random: random.Random | None = None, checked: bool = True) -> None:
        """Do one step.

        Args:
            place: where a bit flips on this rank, one of `PLACES`; "": nowhere.
            random: chooses the bit.
            checked: whether the step may be one that is checked.

        Raises:
            SilentCorruptionError: corruption was found.
        """
        training, self.step = self.training, self.step + 1
        micro_batches = training.reader.read(self.step).micro_batches
        if place == "data":
            assert random is not None
            flip(random.choice(micro_batches).tokens, random, TOKEN_BITS)
        if place in STATE:
            assert random is not None
            self.flip_state(place, random)
        before: Callable[[], None] = _nothing
        self.checked = checked and self.checks.is_due(self.step)
        if checked:
            before = self.checks.before(self.step, micro_batches, before)
        with self._faulty(place, random, micro_batches):
            started = start_step(
                training.model, training.optimizer, micro_batches, training.collectives, before_update=before,
                virtual_ranks=training.config.batch.virtual_ranks, clip_norm=training.config.optimizer.clip_norm,
                guard=self.guard)
        started.result()

    def flip_state(self, place: str, random: random.Random) -> None:
        """Flip a bit of this rank's weights or moments."""
        training = self.training
        group = training.state()["model" if place == "weights" else "optimizer"]
        tensors = [local(tensor) for name, tensor in sorted(group.items()) if tensor.ndim and local(tensor).numel()]
        weights = [tensor.numel() for tensor in tensors]
        flip(random.choices(tensors, weights)[0], random)

    def _faulty(self, place: str, random: random.Random | None, micro_batches: Sequence[MicroBatch]) -> Any:
        if place not in ("gradient", "activation"):
            return contextlib.nullcontext()
        assert random is not None
        if place == "gradient":
            return wrong_gradient(random, len(micro_batches))
        return wrong_activation(self.training.model, random, len(micro_batches))

    def go_back(self) -> None:
        """Set the state to the one that was marked last, on all ranks."""
        for tensor, good in zip(self._tensors, self._good):
            tensor.copy_(good)
        self.training.model.refresh()
        order = self.training.model.order
        assert order is not None
        order.tap = None
        self.guard.in_a_row = 0

    def mark(self) -> None:
        """Keep the present state for `go_back`."""
        for tensor, good in zip(self._tensors, self._good):
            good.copy_(tensor)

    def found(self, place: str = "", random: random.Random | None = None) -> SilentCorruptionError | None:
        """Do one step; return what it found, None for nothing."""
        try:
            self.train(place, random)
        except SilentCorruptionError as error:
            return error
        return None

    def close(self) -> None:
        """End the threads."""
        self.training.reader.close()
        self.training.watch.close()


def _nothing() -> None:
    pass


def settings(folder: Path, name: str, share: float, *overrides: str) -> TrainConfig:
    """Return the settings of a run over `folder`/shards whose steps are checked.

    Args:
        folder: has the shard set.
        name: of the run.
        share: of the steps that are checked; 0: none.
        overrides: of the settings.
    """
    from tests.unit.train.helpers import config

    check = (f"guards.recomputation.share={share}",) if share else ()
    return config(folder, name, "reproducible=true", "data.validation=''", "evaluation.sample_tokens=0",
                  "batch.virtual_ranks=12", "batch.global_sequences=24", "batch.micro_sequences=2",
                  "elastic.max_workers=4", "steps=1000000", *check, *overrides)
