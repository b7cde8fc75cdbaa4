"""Tests of training steps with a teacher: the same result on every number of ranks and in every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import MICRO, ROWS, SHAPE, VOCABULARY, config, micro_batches, whole_values
from tests.unit.train.reproducible.test_ranks import digest
from tidewheel.models import families
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.objective import TopK
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.parallel import ParallelModel, initial_weights
from tidewheel.train.parallel.before import Teacher
from tidewheel.train.reproducible.kernels import deterministic_kernels
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, StepResult, train_step
from tidewheel.train.teacher_config import teacher_config

STEPS = 2
LIVE = {"kind": "distillation", "teacher": "run", "temperature": 2.0, "chunk_tokens": 16}
STORED = {"kind": "distillation", "divergence": "jensen_shannon", "chunk_tokens": 7}


def with_top(micro: MicroBatch, step: int) -> MicroBatch:
    """Return a micro-batch with the tokens of an invented teacher, which depend on its rows alone."""
    generator = torch.Generator().manual_seed(step * ROWS + int(micro.tokens.sum()))
    logits = torch.randn(*micro.tokens.shape, VOCABULARY, generator=generator)
    top = logits.topk(5).indices
    rest = logits.scatter(2, top, float("-inf")).logsumexp(dim=-1, keepdim=True)
    values = torch.cat((logits.gather(2, top), rest), dim=-1)
    return replace(micro, teacher=TopK(top, values.log_softmax(dim=-1)))


def train(wanted: TrainConfig, world_size: int) -> tuple[ParallelModel, list[StepResult], dict[str, Any]]:
    """Return the model, the results of its steps, and its state; with a world size of 1 each process trains alone."""
    runtime = Runtime(dist.get_rank() if world_size > 1 else 0, world_size)
    model = parallel.build(wanted, VOCABULARY, runtime)
    parallel.init_weights(model, seed=3)
    live = bool(wanted.objective.teacher)  # type: ignore[attr-defined]
    if live:
        larger = families.KIND.build(families.DEFAULT, {**SHAPE, "dim": 64, "num_layers": 3})
        built = parallel.build(teacher_config(wanted, larger.shape()), VOCABULARY, runtime, model.mesh)
        initial_weights.init_base(built, seed=5)
        assert not list(built.named_parameters())
        model.before = Teacher(built)
    optimizer, collectives, mesh = build_optimizer(model, wanted.optimizer), Collectives(runtime), model.mesh
    results = []
    for step in range(STEPS):
        micros = micro_batches(step, mesh.data_rank, mesh.data_size)
        micros = micros if live else [with_top(micro, step) for micro in micros]
        results.append(train_step(model, optimizer, micros, collectives, virtual_ranks=4, clip_norm=0.5))
    return model, results, training_state(model, optimizer)


LAYOUTS = [(LIVE, {"tensor": 2}), (LIVE, {"pipeline": 2}), (LIVE, {"context": 2}), (LIVE, {"data": "zero3"}),
           (LIVE, {"data": "ddp"}), (STORED, {"tensor": 2}), (STORED, {"pipeline": 2}), (STORED, {"context": 2}),
           (STORED, {"data": "zero3"})]


def every_layout() -> None:
    alone = {objective["kind"] + str("teacher" in objective): train(config({}, objective=objective), 1)
             for objective in (LIVE, STORED)}
    for objective, layout in LAYOUTS:
        expected_model, expected, _ = alone[objective["kind"] + str("teacher" in objective)]
        model, found, _ = train(config(layout, objective=objective), 2)
        where = f"{objective} with {layout}"
        for ours, theirs in zip(found, expected):
            assert abs(ours.loss / theirs.loss - 1) < 1e-5, f"{where}: {ours.loss} not {theirs.loss}"
            assert abs(ours.gradient_norm / theirs.gradient_norm - 1) < 1e-4, where
            assert (ours.tokens, ours.targets) == (theirs.tokens, theirs.targets), where
            for name, value in theirs.metrics.items():
                assert abs(ours.metrics[name] - value) < 1e-4, f"{where}: {name} {ours.metrics[name]}, not {value}"
        values = whole_values(expected_model)
        for name, value in whole_values(model).items():
            assert (value - values[name]).abs().max() < 1e-4, f"{where}: {name}"
    assert MICRO * 4 == ROWS


@pytest.mark.long
def test_every_layout_gives_the_sums_of_one_process():
    on_ranks(2, every_layout)


REPRODUCIBLE = {1: {}, 2: {"data": "ddp"}, 4: {"data": "zero3", "reduce": "micro_batch"}}


def same_bits(ranks: int, folder: str) -> None:
    found = {}
    with deterministic_kernels():
        for name, objective in (("live", LIVE), ("stored", STORED)):
            _, results, state = train(config(REPRODUCIBLE[ranks], objective=objective, reproducible=True), ranks)
            found[name] = [[(result.loss.hex(), result.gradient_norm.hex()) for result in results], digest(state)]
    if ranks == 1 or dist.get_rank() == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(found))


def test_every_number_of_ranks_has_the_same_bits(tmp_path: Path):
    for ranks in REPRODUCIBLE:
        on_ranks(ranks, same_bits, ranks, str(tmp_path))
    results = [json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in REPRODUCIBLE]
    assert results[0] == results[1] == results[2]
    assert results[0]["live"] != results[0]["stored"]
