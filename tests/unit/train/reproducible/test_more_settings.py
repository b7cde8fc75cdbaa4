"""Settings that reproducible mode allows beside those of `test_ranks` give the same bits on 1, 2 and 4 ranks too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.train.reproducible.test_ranks import PAIRS, STEP, STREAM, Case, train_all

FP16, COMPILED, PLAIN = {"batch": PAIRS, "precision": "fp16"}, {"batch": PAIRS, "compile": True}, {"batch": PAIRS}
CASES = [
    Case(1, "plain", {}, PLAIN), Case(2, "plain", {**STEP, "offload": True}, PLAIN),
    Case(4, "plain", {**STREAM, "offload": True}, PLAIN),
    Case(1, "fp16", {}, FP16), Case(2, "fp16", {"data": "zero1"}, FP16), Case(4, "fp16", STREAM, FP16),
    Case(1, "compiled", {}, COMPILED), Case(2, "compiled", {"data": "ddp"}, COMPILED),
    Case(4, "compiled", STREAM, COMPILED)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return train_all(CASES, tmp_path_factory.mktemp("reproducible"))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_number_of_ranks_has_the_same_bits(results: dict[str, dict[str, Any]], case: Case):
    first = next(other for other in CASES if other.recipe == case.recipe)
    assert results[case.name] == results[first.name]
