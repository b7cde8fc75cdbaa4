"""Helpers that train the same rows under different layouts and compare with one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tidewheel.config import build
from tidewheel.models.decoder import next_tokens
from tidewheel.train import parallel
from tidewheel.train.batches import Noise
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, StepResult, train_step
from tidewheel.train.training import noise_of

VOCABULARY, LENGTH, ROWS, MICRO = 96, 32, 8, 2
SHAPE = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 64, "init_std": 0.1}


def config(parallel_values: dict[str, Any], **changes: Any) -> TrainConfig:
    """Return the configuration of a small model in a layout; `changes` are settings of the model or whole groups."""
    model = {**SHAPE, **changes.pop("model", {})}
    values = {"model": model, "parallel": parallel_values, "elastic": {"max_workers": 4}, **changes,
              "batch": {"global_sequences": ROWS, "micro_sequences": MICRO, "virtual_ranks": 4}}
    return build(TrainConfig, values)


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, positions and segment ids [ROWS, LENGTH] of three documents a row, and some padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    cuts = torch.randint(1, LENGTH - 5, (ROWS, 2), generator=generator).sort(dim=1).values
    positions = torch.arange(LENGTH)[None]
    segments = (positions >= cuts[:, :1]).long() + (positions >= cuts[:, 1:])
    begins = torch.stack((torch.zeros_like(cuts[:, 0]), cuts[:, 0], cuts[:, 1]), dim=1).gather(1, segments)
    segments[::3, -3:] = -1
    return tokens, positions - begins, segments


def micro_batches(seed: int, data_rank: int = 0, data_size: int = 1, noise: Noise | None = None) -> list[MicroBatch]:
    """Return a data rank's micro-batches of the global batch `seed`."""
    tokens, positions, segments = rows(seed)
    targets, each = next_tokens(tokens, segments), ROWS // data_size
    parts = [slice(start, start + MICRO) for start in range(data_rank * each, (data_rank + 1) * each, MICRO)]
    return [MicroBatch(tokens[part], positions[part], segments[part], targets[part], part.start * 4 // ROWS,
                       int((segments[part] >= 0).sum()), int((targets[part] >= 0).sum()),
                       noise=noise and noise(segments[part].numpy(), np.arange(part.start, part.stop), seed),
                       sources=tuple(row % 3 % 2 for row in range(part.start, part.stop)),
                       row_targets=tuple((targets[part] >= 0).sum(dim=1).tolist()))
            for part in parts]


def train(wanted: TrainConfig, world_size: int, steps: int,
          sources: int = 0) -> tuple[ParallelModel, list[StepResult]]:
    """Run a few optimizer steps; with a world size of 1 each process trains alone.

    With `sources` 2, losses are reported by source: rows 1, 4 and 7 are of the second one.
    """
    runtime = Runtime(dist.get_rank() if world_size > 1 else 0, world_size)
    model = parallel.build(wanted, VOCABULARY, runtime)
    parallel.init_weights(model, seed=3)
    if sources:
        model.collect_row_losses()
    optimizer, collectives, mesh = build_optimizer(model, wanted.optimizer), Collectives(runtime), model.mesh
    return model, [train_step(model, optimizer, micro_batches(step, mesh.data_rank, mesh.data_size, noise_of(wanted)),
                              collectives, virtual_ranks=4, clip_norm=0.5, precision=wanted.precision, sources=sources)
                   for step in range(steps)]


def whole_values(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Return {name: whole parameter}."""
    with torch.no_grad():
        return {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor, gathered if it is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def assert_same_training(wanted: TrainConfig, steps: int = 3, sources: int = 0) -> ParallelModel:
    """Check that losses, norms, loads and parameters under `wanted` on all ranks equal those of one process."""
    alone = wanted.model_copy(update={"parallel": type(wanted.parallel)()})
    reference, expected = train(alone, 1, steps, sources)
    model, results = train(wanted, dist.get_world_size(), steps, sources)
    where = str(wanted.parallel)
    for ours, theirs in zip(results, expected):
        assert abs(ours.loss / theirs.loss - 1) < 1e-5, f"{where}: loss {ours.loss}, not {theirs.loss}"
        assert abs(ours.gradient_norm / theirs.gradient_norm - 1) < 1e-4, f"{where}: norm"
        assert len(ours.sources) == sources, where
        for (nats, targets), (expected_nats, expected_targets) in zip(ours.sources, theirs.sources):
            assert targets == expected_targets, where
            assert abs(nats / expected_nats - 1) < 1e-5, f"{where}: {nats}, not {expected_nats}"
        assert (ours.tokens, ours.targets) == (theirs.tokens, theirs.targets), where
        assert ours.metrics.keys() == theirs.metrics.keys(), where
        for name, value in theirs.metrics.items():
            assert abs(ours.metrics[name] - value) < 1e-5, f"{where}: {name} {ours.metrics[name]}, not {value}"
        assert ours.experts.keys() == theirs.experts.keys(), where
        for layer, load in theirs.experts.items():
            assert ours.experts[layer].counts == load.counts, where
            assert abs(ours.experts[layer].entropy - load.entropy) < 1e-4, where
    biases = dict(reference.named_buffers())
    for name, bias in model.named_buffers():
        assert torch.allclose(bias, biases[name]), f"{where}: {name}"
    values, expected_values = whole_values(model), whole_values(reference)
    assert values.keys() == expected_values.keys() or model.pipeline is not None  # whose ranks have some of them
    for name, value in values.items():
        worst = (value - expected_values[name]).abs().max().item()
        assert worst < 1e-4, f"{where}: {name} differs by {worst}"
    return model
