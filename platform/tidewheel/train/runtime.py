"""What the training loop is given by whoever runs it, so that it knows neither Ray nor how checkpoints are stored."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tidewheel.time_limit import TimeLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tidewheel.shards.source import Domain
    from tidewheel.train.collectives import Collectives
    from tidewheel.train.config import TrainConfig
    from tidewheel.train.history import RunHistory
    from tidewheel.train.metrics.sinks import Sink
    from tidewheel.train.parallel import ParallelModel


@dataclass(frozen=True)
class Saves:
    """How saving goes."""

    failed: int = 0
    """So many in a row, the newest included, have failed."""
    busy: bool = False
    """One is being written."""
    seconds: float = 0.0
    """What the newest one took, from its call to its commit or failure; 0: there was none."""
    stall_seconds: float = 0.0
    """For how long it kept the training waiting."""


class Checkpointer(Protocol):
    """Saves and restores a state `{"model": {name: tensor}, "optimizer": {name: tensor}}`; called by all ranks."""

    def load_latest(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Fill the tensors in place from the newest intact checkpoint; its `extra`, or None when there is none."""

    def load_saved(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """The same from what `save` has committed; what was only kept since is forgotten (the run rolls back)."""

    def load_from(self, uri: str, state: dict[str, Any]) -> None:
        """Fill the tensors in place from a checkpoint of another run."""

    def save(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Begin to save; the tensors may change after `settle`."""

    def wait(self) -> None:
        """Return once everything handed over is committed."""

    def let_go(self) -> None:
        """End the save under way, if it is not over in a moment: the ranks part, and the state is safe elsewhere."""

    def keeps(self, step: int) -> bool:
        """Whether `keep` is wanted after this step."""

    def keep(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Keep the state outside this process, where a recovery finds it at once; the tensors may change after
        `settle`."""

    def settle(self) -> None:
        """Return once the tensors handed over to `save` and `keep` may change: they are copied behind the training,
        which only reads them until its next update."""

    def is_safe(self, step: int) -> bool:
        """Whether what was kept of `step` outlives this process and its node: no save is needed before a change."""

    def saves(self) -> Saves:
        """How saving goes; asked on rank 0."""


class Preempted(Exception):
    """The coordinator ended this generation at a step boundary, with everything saved: call `train` in the next one.

    Args:
        step: the last step, which is saved.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"preempted after step {step}")
        self.step = step


class Control(Protocol):
    """What the cluster may ask of the loop. Called on rank 0 only, except `hold`."""

    def poll(self) -> bool:
        """True = save now, then `hold` (a resize or a drain is wanted). It waits only while nobody can be asked."""

    def save_wanted(self) -> bool:
        """Without blocking: True = save in storage now, whatever the interval."""

    def hold(self, step: int) -> None:
        """The save of `step` is committed: raises `Preempted`, or returns if the resize was called off."""

    def event(self, kind: str, **detail: Any) -> None:
        """Record an event of the run."""

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        """`step` of `steps` is done."""


def read_again(control: Control, where: str, what: str) -> None:
    """Tell that a shard is read once more."""
    control.event("shard_read_again", shard=where, problem=what)


class NoCheckpoints:
    """A `Checkpointer` that keeps nothing."""

    def load_latest(self, state: dict[str, Any]) -> dict[str, Any] | None:
        return None

    def load_saved(self, state: dict[str, Any]) -> dict[str, Any] | None:
        return None

    def load_from(self, uri: str, state: dict[str, Any]) -> None:
        raise NotImplementedError("reading another run's checkpoint takes a checkpoint.CheckpointManager")

    def save(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        return

    def wait(self) -> None:
        return

    def let_go(self) -> None:
        return

    def keeps(self, step: int) -> bool:
        return False

    def keep(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        return

    def settle(self) -> None:
        return

    def is_safe(self, step: int) -> bool:
        return False

    def saves(self) -> Saves:
        return Saves()


class NoControl:
    """A `Control` that asks for nothing and records nothing."""

    def poll(self) -> bool:
        return False

    def save_wanted(self) -> bool:
        return False

    def hold(self, step: int) -> None:
        return

    def event(self, kind: str, **detail: Any) -> None:
        return

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        return


@dataclass
class Runtime:
    """One worker's place in the run.

    With `world_size` > 1 torch.distributed must be initialised: gloo for CPU, nccl for CUDA.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device | str = "cpu"
    generation: int = 0
    """How often the run was restarted or resized before; 0 the first time."""
    checkpoints: Checkpointer = field(default_factory=NoCheckpoints)
    control: Control = field(default_factory=NoControl)
    gauges: Callable[[], Sink] | None = None
    """Makes the cluster's own gauges of metrics; None without a cluster."""
    node: str = field(default_factory=socket.gethostname)
    """Name of the node, for the ledger."""
    history: RunHistory | None = None
    """The run's history before this generation, as the coordinator knows it; None: read it from the run's folder."""
    limit: TimeLimit = field(default_factory=TimeLimit)
    """Ends with the generation: nothing waits for storage any longer."""
    sampler: Callable[[ParallelModel, Domain, TrainConfig, Collectives], str] | None = None
    """Writes text samples, as `inference.sample.text_sample` does; None: the run has none."""
    evaluated_beside: bool = False
    """Another process evaluates the checkpoints where the configuration allows it (`evaluation.separate`)."""
