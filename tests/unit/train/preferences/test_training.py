"""Tests of training steps on pairs: the same result on every number of ranks and in every layout."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import SHAPE, whole_values
from tests.unit.train.preferences.pairs import random_pairs, write_pairs
from tests.unit.train.reproducible.test_ranks import digest
from tidewheel.config import build
from tidewheel.shards.opened import Rows
from tidewheel.shards.pairs import open_set
from tidewheel.train import parallel
from tidewheel.train.batches import micro_batch
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.length_groups import cut, longest
from tidewheel.train.objectives import KIND
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.reproducible.kernels import deterministic_kernels
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, StepResult, train_step

VOCABULARY, PAIRS, MICRO, STEPS = 128, 8, 2, 2


def settings(layout: dict[str, Any], objective: dict[str, Any], **changes: Any) -> TrainConfig:
    return build(TrainConfig, {
        "model": SHAPE, "parallel": layout, "elastic": {"max_workers": 4}, "objective": objective,
        "batch": {"global_sequences": PAIRS, "micro_sequences": MICRO, "virtual_ranks": 4}, **changes})


def read(folder: str, objective: dict[str, Any], step: int) -> Rows:
    """Return the rows of a step, with invented log-probabilities of a reference model."""
    parts = KIND.build(objective["kind"], {key: value for key, value in objective.items() if key != "kind"}).parts
    rows = open_set(folder, parts=parts).rows(np.zeros(PAIRS, dtype=np.int64), np.arange(PAIRS) + PAIRS * step)
    reference = np.random.default_rng(step).normal(-20, 5, (PAIRS, parts)).astype(np.float32)
    return replace(rows, reference=reference)


def micro_batches(rows: Rows, model: ParallelModel) -> list[MicroBatch]:
    return [micro_batch(rows, slice(MICRO * number, MICRO * (number + 1)), number, torch.device("cpu"))
            for number in model.share.of(PAIRS // MICRO)]


def train(config: TrainConfig, objective: dict[str, Any], folder: str, world_size: int
          ) -> tuple[ParallelModel, list[StepResult], dict[str, Any]]:
    """Return the model, the results of its steps, and its state; with a world size of 1 each process trains alone."""
    runtime = Runtime(dist.get_rank() if world_size > 1 else 0, world_size)
    model = parallel.build(config, VOCABULARY, runtime)
    parallel.init_weights(model, seed=3)
    optimizer, collectives = build_optimizer(model, config.optimizer), Collectives(runtime)
    optimizer.started()
    results = []
    for step in range(STEPS):
        micros = micro_batches(read(folder, objective, step), model)
        results.append(train_step(model, optimizer, micros, collectives, virtual_ranks=4, clip_norm=0.5))
    return model, results, training_state(model, optimizer)


DPO, ORPO = {"kind": "dpo", "chunk_tokens": 7}, {"kind": "orpo", "chunk_tokens": 16}
KTO, REWARD = {"kind": "kto"}, {"kind": "reward_model", "center": 0.01}
LORA = {"adapter": {"kind": "lora", "rank": 2}, "optimizer": {"learning_rate": 0.03}}
"""The base is the reference, and a reward model's head is trained beside the adapter."""
LAYOUTS = [(DPO, {"tensor": 2}), (ORPO, {"tensor": 2}), (DPO, {"pipeline": 2}), (REWARD, {"pipeline": 2}),
           (DPO, {"data": "zero3"}), (KTO, {"data": "ddp"}), (REWARD, {"data": "zero3"}), (REWARD, {"data": "zero1"})]
WITH_LORA = [(DPO, {"tensor": 2}), (KTO, {"pipeline": 2}), (DPO, {"data": "zero3"}), (REWARD, {"data": "zero3"})]


def every_layout(folder: str, layouts: list[tuple[dict[str, Any], dict[str, Any]]], changes: dict[str, Any]) -> None:
    for objective, layout in layouts:
        model, found, _ = train(settings(layout, objective, **changes), objective, folder, 2)
        alone, expected, _ = train(settings({}, objective, **changes), objective, folder, 1)
        where = f"{objective['kind']} with {layout} {changes}"
        for ours, theirs in zip(found, expected):
            assert abs(ours.loss / theirs.loss - 1) < 1e-5, where
            assert abs(ours.gradient_norm / theirs.gradient_norm - 1) < 1e-4, where
            assert (ours.tokens, ours.targets) == (theirs.tokens, theirs.targets), where
            for name, value in theirs.metrics.items():
                assert abs(ours.metrics[name] - value) < 1e-4, f"{where}: {name} {ours.metrics[name]}, not {value}"
        expected_values = whole_values(alone)
        for name, value in whole_values(model).items():
            assert (value - expected_values[name]).abs().max() < 1e-4, f"{where}: {name}"
        rows = read(folder, objective, 0)
        micro = micro_batch(rows, slice(0, 2), 0, torch.device("cpu"))
        total = model.evaluate(micro)
        model.reshard()
        if model.mesh.size("pipeline", "tensor") > 1:
            dist.all_reduce(total)
        assert torch.allclose(total, alone.evaluate(micro), rtol=1e-4, atol=1e-4), f"{where}: evaluation"


def test_every_layout_gives_the_sums_of_one_process(tmp_path: Path):
    write_pairs(tmp_path, random_pairs(PAIRS * STEPS), shards=1)
    on_ranks(2, every_layout, str(tmp_path), LAYOUTS, {})


def test_every_layout_takes_an_adapters_base_as_the_reference_and_trains_a_head_beside_it(tmp_path: Path):
    write_pairs(tmp_path, random_pairs(PAIRS * STEPS), shards=1)
    on_ranks(2, every_layout, str(tmp_path), WITH_LORA, LORA)


REPRODUCIBLE = {1: {}, 2: {"data": "ddp"}, 4: {"data": "zero3", "reduce": "micro_batch"}}


def same_bits(ranks: int, folder: str) -> None:
    found = {}
    with deterministic_kernels():
        for objective in (DPO, KTO):
            config = settings(REPRODUCIBLE[ranks], objective, reproducible=True)
            _, results, state = train(config, objective, f"{folder}/pairs", ranks)
            steps = [(result.loss.hex(), result.gradient_norm.hex()) for result in results]
            found[objective["kind"]] = [steps, digest(state)]
    if ranks == 1 or dist.get_rank() == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(found))


def test_every_number_of_ranks_has_the_same_bits(tmp_path: Path):
    write_pairs(tmp_path / "pairs", random_pairs(PAIRS * STEPS), shards=1)
    for ranks in REPRODUCIBLE:
        on_ranks(ranks, same_bits, ranks, str(tmp_path))
    results = [json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in REPRODUCIBLE]
    assert results[0] == results[1] == results[2]
    assert results[0]["dpo"] != results[0]["kto"]


def test_ktos_estimate_is_over_the_global_batch(tmp_path: Path):
    write_pairs(tmp_path, random_pairs(PAIRS * STEPS), shards=1)
    rows = read(str(tmp_path), KTO, 0)
    found = []
    for size in (1, 2, 8):
        model = parallel.build(settings({}, KTO), VOCABULARY, Runtime())
        parallel.init_weights(model, seed=3)
        micros = [micro_batch(rows, slice(first, first + size), 0, torch.device("cpu"))
                  for first in range(0, PAIRS, size)]
        micros = [replace(micro, mismatched=replace(micro.mismatched, reference=micro.mismatched.reference - 40))
                  for micro in micros if micro.mismatched is not None and micro.mismatched.reference is not None]
        found.append(model.forward_backward(micros, nullcontext()).sum(dim=0))
    kl = found[0][1 + list(KIND.find("kto").METRICS).index("kl")].item() / PAIRS
    assert kl > 0, "so that it is not clamped"
    assert torch.allclose(found[0], found[1], rtol=1e-5)
    assert torch.allclose(found[0], found[2], rtol=1e-5)


def test_terms_are_pairs_and_their_rows_are_neighbours(tmp_path: Path):
    write_pairs(tmp_path, pairs := random_pairs(PAIRS), shards=1)
    rows = read(str(tmp_path), KTO, 0)
    micro = micro_batch(rows, slice(2, 4), 0, torch.device("cpu"))
    prompt, chosen, rejected = pairs[2]
    texts = [row[mask].tolist() for row, mask in zip(micro.tokens, micro.segment_ids >= 0)]
    assert texts[:2] == [prompt + chosen, prompt + rejected]
    assert micro.mismatched is not None
    other = micro.mismatched.tokens[0][micro.mismatched.segment_ids[0] >= 0].tolist()
    assert other == (prompt + pairs[1][1])[:16]
    answers = [row[row >= 0].tolist() for row in micro.targets]
    assert answers[:2] == [chosen, rejected]
    assert KIND.build("kto").count(micro) == 2
    assert micro.num_tokens == sum(map(len, texts)) + int((micro.mismatched.segment_ids >= 0).sum())
    assert micro.documents is not None
    assert micro.documents.whole_rows, "so that causal attention needs no mask"


def test_padding_that_no_row_needs_is_cut(tmp_path: Path):
    long = [([5] * 3, [6] * size, [7]) for size in (100, 200, 300, 126)]
    write_pairs(tmp_path, long, shards=1, length=512)
    rows = open_set(str(tmp_path)).rows(np.zeros(4, dtype=np.int64), np.arange(4))
    assert longest(rows).tolist() == [103, 203, 303, 129]
    lengths = open_set(str(tmp_path)).lengths(np.zeros(4, dtype=np.int64), np.arange(4))
    assert lengths.tolist() == longest(rows).tolist()
    short = micro_batch(cut(rows, slice(0, 2), 208), slice(None), 0, torch.device("cpu"))
    whole = micro_batch(rows, slice(0, 2), 0, torch.device("cpu"))
    assert (short.tokens.shape, whole.tokens.shape) == ((4, 208), (4, 512))
    assert torch.equal(short.tokens, whole.tokens[:, :208])
    assert torch.equal(short.targets, whole.targets[:, :208])
    assert short.num_targets == whole.num_targets == 302
