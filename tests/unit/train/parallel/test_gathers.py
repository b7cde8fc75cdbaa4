"""What FSDP2 gathers and reduces, by unit, and what the plan says of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.benchmarks.gathers import Call, Counter, count, settings
from tidewheel.plan.communication import unit_bytes
from tidewheel.plan.held import held
from tidewheel.plan.layout import Job, Layout, shares

SHAPE = {"dim": 64, "num_layers": 3, "num_heads": 4, "ffn_dim": 192, "qk_norm": False}
VOCABULARY, RANKS = 512, 4
MATRIX = VOCABULARY * 64
LAYOUTS = ((False, "zero3", "fp32"), (True, "zero3", "fp32"), (False, "zero2", "bf16"), (True, "zero2", "bf16"))
"""Whether embeddings are tied, data parallelism, reduce_dtype."""


@pytest.fixture(scope="module")
def counted() -> dict[tuple[bool, str, str], Counter]:
    return {layout: count(config(*layout), VOCABULARY, RANKS) for layout in LAYOUTS}


def config(tied: bool, data: str, dtype: str) -> Any:
    return settings({**SHAPE, "tie_embeddings": tied}, RANKS, data=data, reduce_dtype=dtype, reduce="step")


def of(counter: Counter, unit: str, kind: str) -> list[Call]:
    return [call for call in counter.calls if (call.unit, call.kind) == (unit, kind)]


@pytest.mark.parametrize(("tied", "data", "dtype"), LAYOUTS)
def test_the_plan_counts_the_bytes_that_are_moved(counted: dict, tied: bool, data: str, dtype: str):
    counter, made = counted[tied, data, dtype], config(tied, data, dtype)
    job, layout = Job(made, VOCABULARY, 16), Layout(made.parallel, made.memory, 1, RANKS, 1)
    (share,) = shares(job, layout)
    planned = unit_bytes(job, layout, held(job, layout, share))
    assert counter.total("all_gather", "forward") == planned.forward
    assert counter.total("all_gather", "backward") == planned.backward
    assert counter.total("reduce_scatter", "backward") == planned.reduced
    assert counter.total("reduce_scatter", "forward") == 0


def test_embedding_and_output_are_units_in_the_products_dtype(counted: dict):
    counter = counted[False, "zero3", "fp32"]
    for unit, size in (("embedding", MATRIX), ("norm", MATRIX + 64)):
        (gather,) = of(counter, unit, "all_gather")
        assert (gather.phase, gather.dtype, gather.bytes) == ("forward", torch.bfloat16, 2 * size)
        (reduction,) = of(counter, unit, "reduce_scatter")
        assert (reduction.dtype, reduction.bytes) == (torch.float32, 4 * size)


def test_a_tied_embedding_is_gathered_once(counted: dict):
    counter = counted[True, "zero3", "fp32"]
    ends = [call for call in counter.calls if not call.unit.startswith("blocks.") and call.bytes]
    assert [(call.kind, call.dtype, call.bytes) for call in ends] == [
        ("all_gather", torch.bfloat16, 2 * (MATRIX + 64)), ("reduce_scatter", torch.float32, 4 * (MATRIX + 64))]


def test_each_gather_starts_one_unit_ahead(counted: dict):
    counter = counted[False, "zero3", "fp32"]
    forward = [(call.kind, call.unit) for call in counter.calls if call.phase == "forward"]
    order = ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert [unit for kind, unit in forward if kind == "all_gather"] == order
    for unit, following in itertools.pairwise(order):
        assert forward.index(("all_gather", following)) < forward.index(("compute", unit)), following
    backward = [(call.kind, call.unit) for call in counter.calls if call.phase == "backward"]
    assert [unit for kind, unit in backward if kind == "all_gather"] == ["blocks.2", "blocks.1", "blocks.0"]
    assert backward.index(("all_gather", "blocks.2")) < backward.index(("reduce_scatter", "norm"))
    assert backward.index(("all_gather", "blocks.0")) < backward.index(("reduce_scatter", "blocks.1"))


def test_parameters_are_gathered_as_far_ahead_as_configured():
    ahead = settings({**SHAPE, "tie_embeddings": False}, RANKS, data="zero3", reduce="step", prefetch=2)
    counter = count(ahead, VOCABULARY, RANKS)
    order = ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm"]
    forward = [(call.kind, call.unit) for call in counter.calls if call.phase == "forward"]
    assert [unit for kind, unit in forward if kind == "all_gather"] == order
    for unit, later in zip(order, order[2:]):
        assert forward.index(("all_gather", later)) < forward.index(("compute", unit)), later
    backward = [(call.kind, call.unit) for call in counter.calls if call.phase == "backward"]
    assert [unit for kind, unit in backward if kind == "all_gather"] == ["blocks.2", "blocks.1", "blocks.0"]
    assert backward.index(("all_gather", "blocks.1")) < backward.index(("reduce_scatter", "norm"))
    assert backward.index(("all_gather", "blocks.0")) < backward.index(("reduce_scatter", "blocks.2"))
