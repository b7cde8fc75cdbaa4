"""A mixture of experts has the same bits for every number of ranks and every number of ranks that share experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.reproducible.test_ranks import Case, train
from tidewheel.train.reproducible.kernels import deterministic_kernels

MODEL = {"kind": "mixtral", "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 44,
         "init_std": 0.1, "num_experts": 8, "experts_per_token": 3, "balancing": "bias", "balancing_rate": 0.01,
         "router_z_loss": 0.01}
FEW = {"global_sequences": 8, "micro_sequences": 1, "virtual_ranks": 4}
"""Two micro-batches for each virtual rank, of 6 rows for each expert on average."""
FP32 = {"model": MODEL, "batch": FEW}
BF16 = {**FP32, "precision": "bf16", "memory": {"activation_checkpointing": "full"}}
STEP, STREAM = {"data": "zero3", "reduce": "step"}, {"data": "zero3", "reduce": "micro_batch"}
CASES = [
    Case(1, "fp32", {}, FP32), Case(2, "fp32", {"data": "ddp"}, FP32), Case(2, "fp32", {**STEP, "expert": 2}, FP32),
    Case(4, "fp32", {**STEP, "expert": 2}, FP32), Case(4, "fp32", {**STREAM, "expert": 2}, FP32),
    Case(4, "fp32", {**STEP, "expert": 4}, FP32), Case(4, "fp32", {**STREAM, "expert": 4}, FP32),
    Case(4, "fp32", {**STEP, "expert": 2, "replicate": 2}, FP32), Case(4, "fp32", STREAM, FP32),
    Case(1, "bf16", {}, BF16), Case(2, "bf16", {**STREAM, "expert": 2}, BF16),
    Case(4, "bf16", {**STEP, "expert": 2}, BF16), Case(4, "bf16", {**STREAM, "expert": 4}, BF16)]


def train_all(ranks: int, folder: str) -> None:
    with deterministic_kernels():
        by_name = {case.name: train(case) for case in CASES if case.ranks == ranks}
    if ranks == 1 or dist.get_rank() == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(by_name))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reproducible-experts")
    for ranks in (1, 2, 4):
        on_ranks(ranks, train_all, ranks, str(folder))
    return {name: result for file in folder.iterdir() for name, result in json.loads(file.read_text()).items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_expert_parallelism_has_the_same_bits_on_every_number_of_ranks(results: dict[str, dict[str, Any]], recipe: str):
    first, *others = [case for case in CASES if case.recipe == recipe]
    wrong = [case.name for case in others if results[case.name] != results[first.name]]
    assert not wrong
