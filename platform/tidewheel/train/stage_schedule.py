"""The base of stage schedules: a part that runs the passes of a pipeline's stage, and decides when the stage updates.

    class OneByOne(tw.StageSchedule):
        "One micro-batch after the other."

        def build(self, stage):
            return MyPasses(stage)

The schedules of torch.distributed.pipelining (`parallel.pipeline_schedule`) end each step before the next one begins. A
stage schedule need not: a stage may begin the next step while later stages still compute this one, and each stage
updates its own weights. The core gives it the stage, and reports its steps. Nothing here imports torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidewheel.parts import Part, name_of
from tidewheel.train import objectives
from tidewheel.train.average import Average

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from tidewheel.models.decoder import Decoder
    from tidewheel.train.config import TrainConfig
    from tidewheel.train.objective import Objective
    from tidewheel.train.optim.model_optimizer import ModelOptimizer
    from tidewheel.train.step import MicroBatch


@dataclass(frozen=True)
class RunningStage:
    """This rank's stage of a pipeline in which each rank has one, in order."""

    index: int
    count: int
    """Number of stages."""
    part: Decoder
    """The stage. Its parameters are the newest weights between two calls of `Passes`."""
    group: ProcessGroup
    """Process group of the stages, in order."""
    device: torch.device
    dtype: torch.dtype
    """Of the residual stream."""
    optimizer: ModelOptimizer
    """Of this stage's parameters alone."""
    objective: Objective
    context: AbstractContextManager[None]
    """To be entered around each forward pass; reusable."""
    done: Callable[[int, Sequence[torch.Tensor], torch.Tensor], None]
    """To be called after the last update of a step, with the step, the losses of its micro-batches (of the last stage;
    else none), and the square of the norm of this stage's gradient, divided by the number of its terms."""

    @property
    def first(self) -> bool:
        """Whether the stage takes tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the stage computes the loss."""
        return self.index == self.count - 1

    def stream(self, micro: MicroBatch) -> torch.Tensor:
        """Return an uninitialised tensor for the residual stream of a micro-batch, [B, L, D]."""
        import torch

        return torch.empty(*micro.tokens.shape, self.part.config.dim, dtype=self.dtype, device=self.device)

    def forward(self, micro: MicroBatch, stream: torch.Tensor | None) -> torch.Tensor:
        """Return the stage's output for a micro-batch: the residual stream, or the loss of the last stage.

        Args:
            micro: the micro-batch.
            stream: output of the stage before; None for the first stage.
        """
        with self.context:
            output: torch.Tensor = self.part(
                micro.tokens if self.first else stream, micro.positions, micro.segment_ids,
                micro.targets if self.last else None, self.objective.bound(micro) if self.last else None,
                micro.documents)
        return output


class Passes:
    """What a stage schedule builds: the passes of one stage. All ranks of the pipeline make the same calls."""

    @abstractmethod
    def start(self, step: int, micro_batches: Sequence[MicroBatch], rate: float) -> None:
        """Begin a step. It may be finished in later calls; steps are finished in order, each with `RunningStage.done`.

        Args:
            step: counts from 1.
            micro_batches: all of the step, the same on each rank.
            rate: learning rate of the step's updates.
        """

    @abstractmethod
    def drain(self) -> None:
        """Finish all steps that were begun."""


class StageSchedule(Part):
    """Base of stage schedules. Experimental: the interface may change."""

    def build(self, stage: RunningStage) -> Passes:
        """Return the passes of a stage. All ranks of the pipeline call it together.

        Args:
            stage: this rank's.
        """
        raise NotImplementedError


def reason_against(config: TrainConfig) -> str | None:
    """Return why the settings of a run do not work with `stage_schedule`, with the nearest legal choice, or None."""
    part, parallel, last = config.stage_schedule, config.parallel, "nearest legal choice"
    if part is None:
        return None
    what = f"stage_schedule {name_of(type(part))}"
    if parallel.pipeline == 1:
        return f"{what} is for pipelines, but parallel.pipeline is 1; {last}: parallel.pipeline 2"
    if config.reproducible:
        return (f"reproducible, but with {what} the result depends on the number of stages and on when a run saves; "
                f"{last}: no stage_schedule")
    shards = {name: getattr(parallel, name) for name in ("tensor", "context", "replicate")}
    for name, size in shards.items():
        if size > 1:
            return f"{what} has been shown for pipelines alone, but parallel.{name} is {size}; {last}: {name} 1"
    if config.elastic.max_workers > parallel.pipeline:
        return (f"{what} has one rank for each stage and no copies, but elastic.max_workers is "
                f"{config.elastic.max_workers}; {last}: {parallel.pipeline}")
    if config.optimizer.clip_norm:
        return (f"{what} updates each stage before the norm of the whole gradient is known, but optimizer.clip_norm is "
                f"{config.optimizer.clip_norm:g}; {last}: clip_norm 0")
    if config.guards.non_finite != "stop" or config.guards.spike != "ignore":
        return (f"{what} has made an update before the step can be judged, so that a guard cannot withhold it; {last}: "
                "guards.non_finite stop and guards.spike ignore")
    needed: list[tuple[str, Any, Any]] = [
        ("parallel.pipeline_schedule", parallel.pipeline_schedule, "1f1b"),
        ("parallel.offload", parallel.offload, False),
        ("model.tie_embeddings", config.model.tie_embeddings, False), ("precision", config.precision, "fp32"),
        ("parameters", config.parameters, "fp32"), ("compile", config.compile, False),
        ("metrics.loss_by_source", config.metrics.loss_by_source, False), ("neftune_alpha", config.neftune_alpha, 0)]
    for name, value, legal in needed:
        if value != legal:
            shown = str(legal).lower() if isinstance(legal, bool) else legal
            return f"{what} has not been shown with {name} {value}; {last}: {name} {shown}"
    average = next((callback for callback in config.callbacks if isinstance(callback, Average)), None)
    others: list[tuple[str, bool]] = [
        ("adapter", config.adapter is not None), ("rollouts", config.rollouts is not None),
        ("compression", config.compression is not None), ("outer", config.outer is not None),
        ("an average in callbacks", average is not None),
        ("an optimizer that estimates the curvature", config.optimizer.curvature_every > 0),
        ("a mixture of experts", config.model.layer_costs(0).experts > 0)]
    for name, present in others:
        if present:
            return f"{what} has not been shown with {name}; {last}: leave it out"
    if name_of(type(config.objective)) != objectives.DEFAULT:
        return (f"{what} has not been shown with objective.kind {name_of(type(config.objective))}; {last}: "
                f"{objectives.DEFAULT}")
    return None
