"""PipeDream on ranks, and the same staleness in one process by brute force: all versions of all weights are kept."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call

from tests.unit.train.parallel.test_pipeline import SEED, VOCABULARY, alone, micro_batches
from tidewheel.config import build
from tidewheel.models.decoder import Decoder
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.base import decays
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.parallel.stages import Stage, stages
from tidewheel.train.runtime import Runtime
from tidewheel.train.stage_steps import StageSteps
from tidewheel.train.step import MicroBatch, StepResult

CONTRIB = Path(__file__).parents[3] / "contrib/pipelines"
PIPEDREAM = "tidewheel_pipelines.pipedream:PipeDream"
TWO_BUFFERS = "tidewheel_pipelines.pipedream:PipeDream2BW"
RATE, DECAY = 1e-2, 0.1
NEEDED: dict[str, Any] = {"optimizer": {"learning_rate": RATE, "clip_norm": 0}, "guards": {"non_finite": "stop"}}
"""Settings that a stage schedule needs."""


def find_contrib() -> None:
    """Let this process import the package, as if it were installed."""
    if str(CONTRIB) not in sys.path:
        sys.path.append(str(CONTRIB))


def configured(schedule: dict[str, Any] | None, pipeline: int, **changes: Any) -> TrainConfig:
    """Return the configuration of a small model in a pipeline."""
    find_contrib()
    model = {"dim": 16, "num_layers": 4, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 32, "tie_embeddings": False}
    values = {"model": model, "parallel": {"pipeline": pipeline}, "elastic": {"max_workers": pipeline}, **NEEDED,
              "batch": {"global_sequences": 8, "micro_sequences": 2, "virtual_ranks": 2}, "stage_schedule": schedule}
    return build(TrainConfig, {**values, **changes})


def batches(steps: int) -> list[list[MicroBatch]]:
    """Return 4 micro-batches of each step."""
    return [micro_batches(step) for step in range(steps)]


@dataclass
class Trained:
    """What a rank knows after its steps."""

    model: ParallelModel
    results: list[StepResult]
    passes: Any


def train(config: TrainConfig, data: Sequence[Sequence[MicroBatch]], drained: Sequence[int] = ()) -> Trained:
    """Train on all ranks, without waiting for a step before the next one except for those in `drained`."""
    find_contrib()
    runtime = Runtime(dist.get_rank(), dist.get_world_size())
    model = parallel.build(config, VOCABULARY, runtime)
    optimizer = build_optimizer(model, config.optimizer)
    steps = StageSteps(config, model, optimizer, Collectives(runtime), None)
    parallel.init_weights(model, SEED)  # after the schedule was built, as a run loads a checkpoint
    optimizer.set_learning_rate(RATE)
    results: list[StepResult] = []
    pending = None
    for step, micros in enumerate(data, start=1):
        started = steps.start(step, micros)
        if pending is not None:
            results.append(pending.result())
        pending = started
        if step in drained:
            results.append(pending.result())
            pending = None
    if pending is not None:
        results.append(pending.result())
    return Trained(model, results, steps.passes)


class Simulated:
    """One process that computes each micro-batch with the weights that each stage has in the pipeline.

    Args:
        config: of the run.
        every: micro-batches of an update; None: double-buffered weights, with an update for each step.
    """

    def __init__(self, config: TrainConfig, every: int | None) -> None:
        self._model: Decoder = alone(config)
        self._stages = stages(config.model.num_layers, config.parallel.pipeline, "1f1b", 1)
        self._every = every
        self.weights = [{name: parameter.detach().clone() for name, parameter in self._model.named_parameters()
                         if _belongs(name, stage)} for stage in self._stages]
        self._rules = [torch.optim.AdamW(_groups(weights), lr=RATE, betas=(0.9, 0.95), eps=1e-8)
                       for weights in self.weights]
        self.losses: list[float] = []

    def period(self, data: Sequence[Sequence[MicroBatch]]) -> None:
        """Take the steps between two moments at which the pipeline is empty."""
        versions = [[_copy(weights)] for weights in self.weights]
        order = [(step, number, micro) for step, micros in enumerate(data) for number, micro in enumerate(micros)]
        ends: list[int] = []  # micro-batches after which there is an update
        sums = [{name: torch.zeros_like(value) for name, value in weights.items()} for weights in self.weights]
        terms, losses, targets = 0, 0.0, 0
        for index, (step, number, micro) in enumerate(order):
            shown = [versions[stage.index][self._version(stage, step, index, ends)] for stage in self._stages]
            leaves = {name: value.clone().requires_grad_() for part in shown for name, value in part.items()}
            loss = functional_call(self._model, leaves, (micro.tokens, micro.positions, micro.segment_ids,
                                                         micro.targets))
            gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
            for total in sums:
                for name, value in total.items():
                    value.add_(gradients[name])
            terms += micro.num_targets
            targets += micro.num_targets
            losses += float(loss.detach())
            last = number == len(data[step]) - 1
            if last or (self._every is not None and (number + 1) % self._every == 0):
                for weights, rule, total, kept in zip(self.weights, self._rules, sums, versions):
                    for name, value in total.items():
                        weights[name].grad = value / terms
                        total[name] = torch.zeros_like(value)
                    rule.step()
                    kept.append(_copy(weights))
                ends.append(index)
                terms = 0
            if last:
                self.losses.append(losses / targets)
                losses, targets = 0.0, 0

    def _version(self, stage: Stage, step: int, index: int, ends: Sequence[int]) -> int:
        if self._every is None:
            return max(step - 1, 0)
        returned = index - (stage.count - 1 - stage.index)  # backward passes that the stage has done before
        return sum(end < returned for end in ends)


def _belongs(name: str, stage: Stage) -> bool:
    if name.startswith("blocks."):
        return int(name.split(".")[1]) in stage.blocks
    return stage.first if name.startswith("embedding.") else stage.last


def _copy(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in weights.items()}


def _groups(weights: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    return [{"params": [value], "weight_decay": DECAY if decays(name, value) else 0.0}
            for name, value in weights.items()]
