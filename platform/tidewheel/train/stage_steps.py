"""Steps of a run whose pipeline has a stage schedule: started by the loop, reported when all stages have updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tidewheel.parts import calling
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.guards.policy import Guard
from tidewheel.train.optim.model_optimizer import ModelOptimizer
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.precision import precision_context
from tidewheel.train.stage_schedule import Passes, RunningStage
from tidewheel.train.step import MicroBatch, StartedStep


@dataclass
class _Begun:
    """A step that was begun, and its report once this stage has updated."""

    counts: list[float]
    """Targets and tokens, which one rank counts."""
    ask: Callable[[], int]
    report: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    sent: Any = None
    """The sum of the report over ranks, under way."""


class StageSteps:
    """The steps of one worker. All ranks make the same calls.

    A step is reported by one small sum over ranks, which each rank begins as soon as its stage has updated. It has a
    group of its own, because ranks are at different steps.

    Args:
        config: of the run, with a `stage_schedule`.
        model: this rank's stage.
        optimizer: of the stage.
        collectives: over all ranks.
        guard: judges the steps afterwards.
    """

    def __init__(self, config: TrainConfig, model: ParallelModel, optimizer: ModelOptimizer, collectives: Collectives,
                 guard: Guard | None) -> None:
        assert config.stage_schedule is not None
        self._model, self._optimizer, self._collectives, self._guard = model, optimizer, collectives, guard
        self._begun: dict[int, _Begun] = {}
        self._reports = dist.new_group()
        stage = RunningStage(
            index=model.mesh.coordinate("pipeline"), count=model.mesh.size("pipeline"), part=model.parts[0],  # type: ignore[arg-type]
            group=model.mesh.group("pipeline"), device=collectives.device, dtype=torch.float32,
            optimizer=optimizer, objective=model.objective,
            context=precision_context(collectives.device, config.precision), done=self._done)
        with calling(config.stage_schedule):
            self.passes: Passes = config.stage_schedule.build(stage)

    def start(self, step: int, micro_batches: Sequence[MicroBatch], ask: Callable[[], int] = lambda: 0,
              settle: Callable[[], None] = lambda: None) -> StartedStep:
        """Begin a step.

        Args:
            step: counts from 1.
            micro_batches: of the step.
            ask: called once this stage has updated; returns this rank's part of `StepResult.asked`.
            settle: waits until weights may change, because a save may still be copying them.
        """
        if not self._begun:
            settle()
        model = self._model
        counts = [0.0, 0.0]
        if model.mesh.leads:
            counts = [float(sum(model.objective.count(micro) for micro in micro_batches)),
                      float(sum(micro.num_tokens for micro in micro_batches))]
        self._begun[step] = _Begun(counts, ask)
        rate = self._optimizer.learning_rate
        self.passes.start(step, micro_batches, rate)
        self._optimizer.set_learning_rate(rate)  # an update of an earlier step had its own
        return StartedStep(lambda: self._ended(step), self._guard, ())

    def _done(self, step: int, losses: Sequence[torch.Tensor], square: torch.Tensor) -> None:
        begun = self._begun[step]
        loss = sum(float(each) for each in losses)
        begun.report = torch.tensor([loss, float(square), *begun.counts, float(begun.ask())], dtype=torch.float64,
                                    device=self._collectives.device)
        begun.sent = dist.all_reduce(begun.report, group=self._reports, async_op=True)

    def _ended(self, step: int) -> torch.Tensor:
        """Wait for a step and return its numbers, see `StartedStep`."""
        begun = self._begun[step]
        if step == max(self._begun):  # the same on all ranks, whether or not a stage has more to do
            self.passes.drain()
        assert begun.sent is not None, "a stage schedule finishes a step at the latest while the next one begins"
        begun.sent.wait()
        del self._begun[step]
        loss, square, targets, tokens, heard = self._collectives.to_host(begun.report).unbind()
        loss, norm = loss / targets.clamp(min=1), square.sqrt()
        judged = loss.new_zeros(4)
        if self._guard is not None:
            judged = self._guard.judge(loss.to(self._collectives.device), norm.to(self._collectives.device))
        return torch.cat([torch.stack([loss, norm, tokens, targets, heard]), judged.cpu()])
