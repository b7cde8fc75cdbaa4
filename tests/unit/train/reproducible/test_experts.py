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
LONGER = {**FP32, "batch": {**FEW, "micro_sequences": 2}}
CASES = [
    Case(1, "fp32", {}, FP32), Case(2, "fp32", {**STEP, "expert": 2}, FP32),
    Case(4, "fp32", {**STEP, "expert": 2}, FP32), Case(4, "fp32", {**STREAM, "expert": 4}, FP32),
    Case(1, "bf16", {}, BF16), Case(4, "bf16", {**STREAM, "expert": 2}, BF16)]
MORE = [
    CASES[0], Case(2, "fp32", {"data": "ddp"}, FP32), Case(2, "fp32", {**STREAM, "expert": 2}, FP32),
    *(Case(4, "fp32", {**layout, "expert": 2, "replicate": 2}, FP32) for layout in (STEP, STREAM)),
    Case(4, "fp32", {**STREAM, "expert": 2}, FP32), Case(4, "fp32", {**STEP, "expert": 4}, FP32),
    Case(4, "fp32", STREAM, FP32), CASES[4], Case(2, "bf16", {**STREAM, "expert": 2}, BF16),
    *(Case(4, "bf16", {**STEP, "expert": expert}, BF16) for expert in (1, 2, 4)),
    *(Case(ranks, kind, {**STEP, "expert": ranks}, {**FP32, "model": {**MODEL, "kind": kind, **changes}})
      for kind, changes in (("gpt_oss", {}), ("deepseek_v3", {"shared_experts": 1})) for ranks in (1, 2, 4)),
    Case(2, "tensor", {"tensor": 2}, LONGER), Case(4, "tensor", {"tensor": 2, "expert": 2, **STEP}, LONGER),
    Case(2, "context", {"context": 2, **STEP}, LONGER), Case(2, "context", {"context": 2, "expert": 2, **STEP}, LONGER),
    *(Case(4, "context", {"context": 2, "expert": expert, **STREAM}, LONGER) for expert in (2, 4))]


def train_all(cases: list[Case], folder: str) -> None:
    ranks = cases[0].ranks
    with deterministic_kernels():
        by_name = {case.name: train(case) for case in cases}
    if ranks == 1 or dist.get_rank() == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(by_name))


def differing(cases: list[Case], folder: Path) -> list[str]:
    """Train the cases, and return the names of those with other bits than the first of their recipe."""
    for ranks in (1, 2, 4):
        on_ranks(ranks, train_all, [case for case in cases if case.ranks == ranks], str(folder))
    results: dict[str, Any] = {}
    for file in folder.iterdir():
        results |= json.loads(file.read_text())
    first = {case.recipe: results[case.name] for case in reversed(cases)}
    assert first["fp32"] != first["bf16"]
    return [case.name for case in cases if results[case.name] != first[case.recipe]]


def test_expert_parallelism_has_the_same_bits_on_every_number_of_ranks(tmp_path: Path):
    assert not differing(CASES, tmp_path)


@pytest.mark.long
def test_more_layouts_of_experts_have_the_same_bits(tmp_path: Path):
    assert not differing(MORE, tmp_path)
