"""Every layout draws the same initial values, and each rank draws its rows alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import VOCABULARY, config, whole
from tidewheel.models import initial_values, random_jump
from tidewheel.models.initial_values import init_parameter
from tidewheel.train import parallel
from tidewheel.train.runtime import Runtime

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"data": "zero3"}, {"data": "zero1"}, {"tensor": 2}, {"tensor": 2, "data": "zero1"}, {"tensor": 4},
    {"context": 2, "replicate": 2}, {"pipeline": 2, "data": "zero2"})
SEED = 3


def test_initial_values_do_not_depend_on_the_layout():
    on_ranks(4, _every_layout)


def _every_layout() -> None:
    random_jump.DRAWN = 0
    drawn: list[int] = []
    original = initial_values.normal_values

    def counted(seed: int, count: int, start: int, stop: int, std: float) -> torch.Tensor:
        drawn.append(stop - start)
        return original(seed, count, start, stop, std)

    initial_values.normal_values = counted
    for layout in LAYOUTS:
        drawn.clear()
        model = parallel.build(config(layout), VOCABULARY, Runtime(dist.get_rank(), 4))
        parallel.init_weights(model, SEED)
        mine, values = sum(drawn), {name: whole(parameter) for name, parameter in model.named_parameters()}
        for name, value in values.items():
            assert torch.equal(value, init_parameter(name, value.shape, model.config, SEED)), f"{layout}: {name}"
        if layout == {"data": "zero3"}:  # a quarter of every matrix
            assert mine * 4 == sum(value.numel() for value in values.values() if value.ndim > 1)
    initial_values.normal_values = original


@pytest.mark.parametrize("rows", [range(0, 3), range(2, 7), range(6, 7), range(4, 4)])
@pytest.mark.parametrize("name", ["blocks.0.attention.wq.weight", "blocks.0.ffn.w2.weight", "norm.weight"])
def test_rows_are_those_of_the_whole_parameter(rows: range, name: str):
    shape = (7,) if name == "norm.weight" else (7, 9)
    model = config({}).model
    part = initial_values.init_rows(name, shape, model, SEED, rows)
    assert torch.equal(part, init_parameter(name, shape, model, SEED)[rows.start:rows.stop])
