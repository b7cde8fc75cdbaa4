"""Parameters, optimizer state, losses and norms are bit for bit the same for every number of ranks and every layout.

Each number of ranks is started once and trains all its cases; `Case.recipe` says which must agree.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.ranks import on_ranks
from tidewheel.config import build
from tidewheel.models.decoder import next_tokens
from tidewheel.train import optimizers, parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.precision import LossScale
from tidewheel.train.reproducible.kernels import deterministic_kernels
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, train_step

VOCABULARY, LENGTH, STEPS = 98, 16, 2
MANY = {"global_sequences": 24, "micro_sequences": 1, "virtual_ranks": 12}
"""Two micro-batches for each virtual rank, which 2, 3 and 4 ranks can share out."""
PAIRS = {"global_sequences": 8, "micro_sequences": 1, "virtual_ranks": 4}
"""The same for cases without 3 ranks, in a third of the time."""
FEW = {"global_sequences": 8, "micro_sequences": 2, "virtual_ranks": 4}
"""Cases with tensor parallelism, which are slow because DTensors cost time for every micro-batch."""


@dataclass(frozen=True)
class Case:
    """A layout and a number of ranks."""

    ranks: int
    recipe: str
    layout: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    reproducible: bool = True

    @property
    def name(self) -> str:
        layout = " ".join(f"{key}={value}" for key, value in self.layout.items())
        return f"{self.recipe} on {self.ranks}: {layout}" + ("" if self.reproducible else ", fast")


STEP, STREAM = {"data": "zero3", "reduce": "step"}, {"data": "zero3", "reduce": "micro_batch"}
HALF = {"batch": PAIRS, "precision": "bf16", "memory": {"activation_checkpointing": "full"}}
MASTER = {"batch": PAIRS, "precision": "bf16", "parameters": "bf16"}
LION = {"optimizer": {"kind": "lion", "clip_norm": 0.5}, "loss": {"chunk_tokens": 5, "z_loss": 1e-3}}
EXPERTS = {"batch": PAIRS, "model": {
    "kind": "mixtral", "dim": 32, "num_layers": 2, "num_heads": 4, "ffn_dim": 40, "num_experts": 4, "balancing": "bias",
    "router_z_loss": 0.01, "init_std": 0.1}}
FLOW = {"batch": {**FEW, "global_sequences": 16}}
TENSOR, CONTEXT = {"batch": FEW, "loss": {"chunk_tokens": 8}}, {"batch": FEW}
CASES = [
    Case(1, "fp32", {"data": "zero2"}),
    Case(2, "fp32", {"data": "ddp"}), Case(2, "fp32", {"data": "zero2"}), Case(2, "fp32", STREAM),
    Case(3, "fp32", {"data": "zero1"}), Case(3, "fp32", STEP), Case(3, "fp32", STREAM),
    Case(4, "fp32", {"data": "zero1"}), Case(4, "fp32", STEP), Case(4, "fp32", STREAM),
    *(Case(4, "fp32", {**layout, "replicate": 2}) for layout in (STEP, STREAM)),
    Case(1, "bf16", {}, HALF), Case(2, "bf16", STEP, HALF), Case(4, "bf16", STREAM, HALF),
    Case(1, "masters", {}, MASTER), Case(2, "masters", {"data": "zero1"}, MASTER), Case(4, "masters", STEP, MASTER),
    Case(1, "lion", {}, LION), Case(3, "lion", STREAM, LION),
    Case(1, "experts", {}, EXPERTS), Case(2, "experts", {"data": "zero1"}, EXPERTS),
    Case(4, "experts", STREAM, EXPERTS),
    Case(2, "tensor", {"tensor": 2}, TENSOR), Case(4, "tensor", {"tensor": 2, **STEP}, TENSOR),
    Case(2, "context", {"context": 2, "data": "ddp"}, CONTEXT), Case(4, "context", {"context": 2, **STEP}, CONTEXT),
    *(Case(ranks, method, {"context": 2, "context_method": method, **layout}, CONTEXT)
      for method in ("all_to_all", "ring") for ranks, layout in ((2, {"data": "ddp"}), (4, STEP))),
    *(Case(ranks, "pipeline", {"pipeline": 2, "data": "zero1"}, FLOW) for ranks in (2, 4)),
    *(Case(ranks, "fast", layout, {"batch": PAIRS}, reproducible=False)
      for ranks, layout in ((1, {}), (2, STEP), (4, STEP)))]


def settings(case: Case) -> TrainConfig:
    return build(TrainConfig, {
        "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 60, "init_std": 0.1,
                  "tie_embeddings": True},
        "batch": MANY,
        "optimizer": {"clip_norm": 0.5}, "elastic": {"max_workers": 4}, "parallel": case.layout,
        "reproducible": case.reproducible, **case.changes})


def micro_batches(model: ParallelModel, config: TrainConfig, step: int) -> list[MicroBatch]:
    """Return this rank's micro-batches in its order, with two documents a row and padding in some."""
    batch, found = config.batch, []
    total = batch.global_sequences // batch.micro_sequences
    for number in model.share.of(total):
        generator = torch.Generator().manual_seed(1000 * step + number)
        tokens = torch.randint(0, VOCABULARY, (batch.micro_sequences, LENGTH), generator=generator)
        positions = torch.arange(LENGTH).expand_as(tokens).clone()
        segments = (positions >= 3 + number % 7).long()
        if number % 3 == 0:
            segments[:, -4:] = -1
        targets = next_tokens(tokens, segments)
        found.append(MicroBatch(tokens, positions, segments, targets, number * batch.virtual_ranks // total,
                                int((segments >= 0).sum()), int((targets >= 0).sum())))
    return found


def digest(state: dict[str, dict[str, torch.Tensor]]) -> str:
    """Return the SHA-256 of all tensors, gathered, in the order of their names."""
    result = hashlib.sha256()
    for group in sorted(state):
        for name, tensor in sorted(state[group].items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            result.update(f"{group}/{name} {tuple(whole.shape)}".encode())
            result.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def train(case: Case) -> dict[str, Any]:
    """Return the losses, norms and state digest of a case."""
    config = settings(case)
    runtime = Runtime(dist.get_rank() if case.ranks > 1 else 0, case.ranks)
    model = parallel.build(config, VOCABULARY, runtime)
    parallel.init_weights(model, seed=3)
    optimizer = build_optimizer(model, config.optimizer)
    optimizer.started()
    loss_scale = LossScale() if config.precision == "fp16" else None
    steps = []
    for step in range(STEPS):
        optimizer.set_learning_rate(3e-3 if isinstance(config.optimizer, optimizers.AdamW) else 1e-4)
        result = train_step(model, optimizer, micro_batches(model, config, step), Collectives(runtime), clip_norm=0.5,
                            virtual_ranks=config.batch.virtual_ranks, precision=config.precision,
                            loss_scale=loss_scale)
        assert result.gradient_norm > 0.5, "clipping is active: a norm in other last bits would show"
        steps.append((result.loss.hex(), result.gradient_norm.hex(), result.tokens, result.targets))
    return {"steps": steps, "digest": digest(training_state(model, optimizer))}


def train_each(cases: list[Case], file: str) -> None:
    with deterministic_kernels():
        by_name = {case.name: train(case) for case in cases}
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(by_name))


def train_all(cases: list[Case], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the result of each case by name. Each number of ranks is started once."""
    results: dict[str, dict[str, Any]] = {}
    for ranks in sorted({case.ranks for case in cases}):
        file = folder / f"{ranks}.json"
        on_ranks(ranks, train_each, [case for case in cases if case.ranks == ranks], str(file))
        results |= json.loads(file.read_text())
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return train_all(CASES, tmp_path_factory.mktemp("reproducible"))


@pytest.mark.parametrize("case", [case for case in CASES if case.reproducible], ids=lambda case: case.name)
def test_every_number_of_ranks_has_the_same_bits(results: dict[str, dict[str, Any]], case: Case):
    first = next(other for other in CASES if other.recipe == case.recipe)
    assert results[case.name] == results[first.name]


def test_recipes_differ(results: dict[str, dict[str, Any]]):
    digests = {case.recipe: results[case.name]["digest"] for case in CASES if case.reproducible}
    assert len(set(digests.values())) == len(digests) == 10


def test_in_fast_mode_the_bits_depend_on_the_number_of_ranks(results: dict[str, dict[str, Any]]):
    fast = [results[case.name] for case in CASES if not case.reproducible]
    assert len({result["digest"] for result in fast}) > 1
    assert len({json.dumps(result["steps"]) for result in fast}) > 1
