"""Interfaces that the caller of the training loop implements. The loop knows neither Ray nor the checkpoint format."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tidewheel.time_limit import TimeLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from tidewheel.shards.source import Domain
    from tidewheel.train.answers import Prompt
    from tidewheel.train.collectives import Collectives
    from tidewheel.train.config import TrainConfig
    from tidewheel.train.history import RunHistory
    from tidewheel.train.metrics.sinks import Sink
    from tidewheel.train.outer_exchange import OpenOuter
    from tidewheel.train.parallel import ParallelModel
    from tidewheel.train.parallel.kept_base import KeptBase


AVERAGE = "average"
"""Group of a state whose tensors a checkpoint may lack: the averages of the parameters (`train.averages`)."""
OUTER = "outer"
"""Group of a state whose tensors a checkpoint may lack: what outer gradients have left out (`train.outer_exchange`)."""
COMPRESSION = "compression"
"""Group of a state that gradient compression keeps (`train.parallel.coded`)."""
SUMMED = f"{COMPRESSION}/residual/"
"""Paths of tensors [slots, elements] that a load by another number of ranks adds up: only their sum over slots counts.
"""


@dataclass(frozen=True)
class Saves:
    """State of a run's saves."""

    failed: int = 0
    """Saves that have failed in a row, up to the newest."""
    busy: bool = False
    """Whether a save is being written."""
    seconds: float = 0.0
    """Duration of the newest save, from its call to its commit or failure; 0 before the first."""
    stall_seconds: float = 0.0
    """How long the newest save kept the training waiting."""


@dataclass(frozen=True)
class Keeps:
    """What a rank has kept in the memory tier in this generation."""

    step: int = -1
    """Step of the newest copy; -1 before the first."""
    waits: int = 0
    """Copies for which the training waited, because the copy before was still under way."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint of another run that was loaded."""

    uri: str
    """Of the checkpoint itself."""
    hash: str
    """Of the model's tensors as they are stored."""


@dataclass(frozen=True)
class Described:
    """The decoder in a checkpoint of another run."""

    model: dict[str, Any]
    """Its settings, `Model.shape()`."""
    vocabulary_size: int
    """Rows of its embedding."""
    tokenizer: str
    """Hash of its tokenizer's file; "" if it is not known."""


class Checkpointer(Protocol):
    """Saves and restores a state `{"model": {name: tensor}, "optimizer": {name: tensor}}`; called by all ranks.

    A checkpoint may lack tensors of the group `AVERAGE`; a load then leaves them as they are.
    """

    def load_latest(self, state: dict[str, Any],
                    usable: Callable[[Mapping[str, Any]], bool] | None = None) -> dict[str, Any] | None:
        """Fill the tensors in place from the newest intact checkpoint; return its `extra`, None without one.

        Args:
            state: the tensors.
            usable: is called with the `extra` of a checkpoint; the checkpoint is passed by if it returns False. It is
                the same function on all ranks, and not all of them call it. None: all are usable.
        """

    def load_saved(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Fill the tensors from the newest checkpoint in storage, and drop newer ones in memory: the run rolls back."""

    def load_branch(self, uri: str, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Fill the tensors in place from a checkpoint of another run, which is only read; return its `extra`.

        Args:
            uri: the other run.
            step: of the checkpoint.
            state: the tensors.
        """

    def load_from(self, uri: str, state: dict[str, Any], head: str = "") -> Loaded:
        """Fill the tensors in place from a checkpoint of another run, and return which one it was.

        Args:
            uri: of the checkpoint, or of its run.
            state: the tensors.
            head: path of an objective's head, which stays as it is if the checkpoint is of a decoder; "": a decoder is
                expected.
        """

    def describe(self, uri: str) -> Described:
        """Return which decoder a checkpoint of another run holds; called by all ranks."""

    def save(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Start a save. The tensors may change after `settle`.

        Args:
            step: the last step done.
            state: the tensors.
            extra: JSON values that go with them.
        """

    def wait(self) -> None:
        """Wait until all saves are committed or have failed."""

    def let_go(self) -> None:
        """Abandon the save in progress unless it is about to finish: the generation ends and memory is safe."""

    def has_memory(self) -> bool:
        """Return whether there is a memory tier, the same on all ranks."""

    def keeps(self, step: int) -> bool:
        """Return whether a copy in memory is due after this step; called on rank 0, which decides for all ranks."""

    def may_keep(self) -> bool:
        """Return whether this rank can make a copy now. If one rank cannot, no rank calls `keep`."""

    def keeping(self) -> Keeps:
        """Return what this rank has kept."""

    def keep(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Copy the state to the memory tier, for a fast recovery. The tensors may change after `settle`.

        Args:
            step: the last step done.
            state: the tensors.
            extra: JSON values that go with them.
        """

    def settle(self) -> None:
        """Wait until the tensors given to `save` and `keep` may change.

        They are copied in the background while the training only reads them, up to its next update.
        """

    def is_safe(self, step: int) -> bool:
        """Return whether the copy of `step` survives the loss of this node, so that a change needs no save first."""

    def saves(self) -> Saves:
        """Return the state of the run's saves; called on rank 0."""

    def distrust(self, after: int, detail: dict[str, Any]) -> None:
        """Mark all states of later steps that this generation or an earlier one has saved, or still saves, as suspect.

        They are never loaded. Called on rank 0.

        Args:
            after: the last step that is known good.
            detail: why, JSON values.
        """


class Preempted(Exception):
    """The coordinator ended this generation at a step boundary, with everything saved: call `train` in the next one.

    Args:
        step: the last step, which is saved.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"preempted after step {step}")
        self.step = step


class Control(Protocol):
    """Requests of the cluster to the loop. Called on rank 0 only, except `hold`."""

    def poll(self) -> bool:
        """Return True for a planned resize or drain: save now, then call `hold`.

        The call waits only while the coordinator cannot be reached.
        """

    def save_requested(self) -> bool:
        """Return True to save to storage now, before the interval has passed; does not block."""

    def hold(self, step: int) -> None:
        """Report that `step` is saved; return if the resize was called off.

        Raises:
            Preempted: this generation ends.
        """

    def event(self, kind: str, **detail: Any) -> None:
        """Record an event of the run."""

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        """Report that `step` of `steps` is done.

        Args:
            step: counts from 1.
            steps: of the whole run.
            metrics: the step's figures.
        """


def read_again(control: Control, where: str, what: str) -> None:
    """Record that a shard is read again.

    Args:
        control: records the event.
        where: the shard.
        what: the problem of the first read.
    """
    control.event("shard_read_again", shard=where, problem=what)


class AbortedError(RuntimeError):
    """The ranks of this generation have parted, and values that the step left on the device mean nothing."""


class Group(Protocol):
    """The process group of a generation, which may be broken off at any time."""

    def is_whole(self) -> bool:
        """Return whether no collective of the group was broken off."""

    def break_off(self) -> None:
        """Make every present and later collective of this rank end."""


class LastingGroup(Group):
    """A `Group` that nobody breaks off: of one rank, or of a program that ends with its first failure."""

    def is_whole(self) -> bool:
        return True

    def break_off(self) -> None:
        return


class NoCheckpoints(Checkpointer):
    """A `Checkpointer` that keeps nothing."""

    def load_latest(self, state: dict[str, Any],
                    usable: Callable[[Mapping[str, Any]], bool] | None = None) -> dict[str, Any] | None:
        return None

    def load_branch(self, uri: str, step: int, state: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError("reading another run's checkpoint takes a checkpoint.CheckpointManager")

    def load_saved(self, state: dict[str, Any]) -> dict[str, Any] | None:
        return None

    def load_from(self, uri: str, state: dict[str, Any], head: str = "") -> Loaded:
        raise NotImplementedError("reading another run's checkpoint takes a checkpoint.CheckpointManager")

    def describe(self, uri: str) -> Described:
        raise NotImplementedError("reading another run's checkpoint takes a checkpoint.CheckpointManager")

    def save(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        return

    def wait(self) -> None:
        return

    def let_go(self) -> None:
        return

    def has_memory(self) -> bool:
        return False

    def keeps(self, step: int) -> bool:
        return False

    def may_keep(self) -> bool:
        return True

    def keeping(self) -> Keeps:
        return Keeps()

    def keep(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        return

    def settle(self) -> None:
        return

    def is_safe(self, step: int) -> bool:
        return False

    def saves(self) -> Saves:
        return Saves()

    def distrust(self, after: int, detail: dict[str, Any]) -> None:
        return


class NoControl(Control):
    """A `Control` that requests nothing and records nothing."""

    def poll(self) -> bool:
        return False

    def save_requested(self) -> bool:
        return False

    def hold(self, step: int) -> None:
        return

    def event(self, kind: str, **detail: Any) -> None:
        return

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        return


@dataclass
class Runtime:
    """One worker's rank, device and services.

    With `world_size` > 1 torch.distributed must be initialised: gloo for CPU, nccl for CUDA.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device | str = "cpu"
    generation: int = 0
    """Number of the generation; 0 for the first of a run."""
    checkpoints: Checkpointer = field(default_factory=NoCheckpoints)
    control: Control = field(default_factory=NoControl)
    group: Group = field(default_factory=LastingGroup)
    gauges: Callable[[], Sink] | None = None
    """Creates the cluster's own gauges of metrics; None without a cluster."""
    node: str = field(default_factory=socket.gethostname)
    """Name of the node, for the ledger."""
    history: RunHistory | None = None
    """The run's history before this generation, as the coordinator knows it; None: read it from the run's folder."""
    limit: TimeLimit = field(default_factory=TimeLimit)
    """Ends with the generation; nothing waits for storage after that."""
    sampler: Callable[[ParallelModel, Domain, TrainConfig, Collectives], str] | None = None
    """Writes text samples, as `inference.sample.text_sample` does; None: the run has none."""
    kept: KeptBase | None = None
    """Of this process, which may have more generations: the frozen base of its adapter; None: nothing is kept."""
    answerer: Callable[[ParallelModel, Sequence[Domain], TrainConfig, Collectives, Sequence[Prompt]],
                       Iterator[str]] | None = None
    """Answers prompts of validation, as `inference.answers.answer` does; None: the run has none."""
    tasks: Callable[[ParallelModel, Domain, TrainConfig, Collectives], dict[str, dict[str, float]]] | None = None
    """Evaluates tasks, as `inference.during_training.task_scores` does; None: the run has none."""
    outer: OpenOuter | None = None
    """Opens the exchange with other groups, as `outer.exchange.Exchange` does, for a run with `outer`."""
    evaluated_beside: bool = False
    """Another process evaluates the checkpoints where the configuration allows it (`evaluation.separate`)."""
