"""Settings that reproducible mode allows beside those of `test_ranks` give the same bits on 1, 2 and 4 ranks too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.reproducible.test_ranks import PAIRS, STEP, STREAM, Case, train
from tidewheel.train.reproducible.kernels import deterministic_kernels

FP16, COMPILED, PLAIN = {"batch": PAIRS, "precision": "fp16"}, {"batch": PAIRS, "compile": True}, {"batch": PAIRS}
CASES = [
    Case(1, "plain", {}, PLAIN), Case(2, "plain", {**STEP, "offload": True}, PLAIN),
    Case(4, "plain", {**STREAM, "offload": True}, PLAIN),
    Case(1, "fp16", {}, FP16), Case(2, "fp16", {"data": "zero1"}, FP16), Case(4, "fp16", STREAM, FP16),
    Case(1, "compiled", {}, COMPILED), Case(2, "compiled", {"data": "ddp"}, COMPILED),
    Case(4, "compiled", STREAM, COMPILED)]


def train_all(ranks: int, folder: str) -> None:
    with deterministic_kernels():
        by_name = {case.name: train(case) for case in CASES if case.ranks == ranks}
    if dist.get_rank() == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(by_name))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reproducible")
    for ranks in (1, 2, 4):
        on_ranks(ranks, train_all, ranks, str(folder))
    return {name: result for file in folder.iterdir() for name, result in json.loads(file.read_text()).items()}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_number_of_ranks_has_the_same_bits(results: dict[str, dict[str, Any]], case: Case):
    first = next(other for other in CASES if other.recipe == case.recipe)
    assert results[case.name] == results[first.name]
