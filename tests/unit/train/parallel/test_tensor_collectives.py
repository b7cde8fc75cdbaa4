"""Bytes of tensor parallelism's collectives in a block, what overlaps with products, and what the plan says of it."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.gathers import settings
from tests.benchmarks.tensor_collectives import WAYS, Call, count
from tidewheel.plan.communication import Group, sent, tensor_axis
from tidewheel.plan.layout import Job, Layout, Share
from tidewheel.train.parallel.config import ParallelConfig

RANKS, LENGTH, ROWS = 4, 64, 2
SHAPE = {"dim": 64, "num_layers": 1, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 192}
INPUT = ROWS * LENGTH * 64
"""Elements of a block's input."""


@pytest.fixture(scope="module")
def counted() -> dict[str, list[Call]]:
    model = settings(SHAPE, 1).model
    return {way: count(way, model, RANKS, LENGTH, ROWS) for way in WAYS}


def test_activations_are_gathered_in_the_products_dtype(counted: dict[str, list[Call]]):
    gathers = {way: [call for call in calls if (call.kind, call.phase) == ("all_gather", "forward")]
               for way, calls in counted.items()}
    assert [call.bytes for call in gathers["gathers in fp32"]] == [4 * INPUT, 4 * INPUT]
    for way in ("plain", "async_tensor"):
        assert [(call.bytes, call.dtype) for call in gathers[way]] == 2 * [(2 * INPUT, torch.bfloat16)]
    assert not any(call.products for call in counted["plain"])


def test_every_collective_overlaps_with_products(counted: dict[str, list[Call]]):
    calls = counted["async_tensor"]
    assert [(call.kind, call.phase, call.products) for call in calls] == [
        ("all_gather", "forward", 3), ("reduce_scatter", "forward", 1),  # q, k and v; o
        ("all_gather", "forward", 2), ("reduce_scatter", "forward", 1),  # w1 and w3; w2
        ("all_gather", "backward", 1), ("reduce_scatter", "backward", 1),
        ("all_gather", "backward", 1), ("reduce_scatter", "backward", 1)]
    assert {call.dtype for call in calls} == {torch.bfloat16}


@pytest.mark.parametrize("way", ["plain", "async_tensor"])
def test_the_plan_counts_the_bytes_that_are_sent(counted: dict[str, list[Call]], way: str):
    parallel = ParallelConfig(tensor=RANKS, async_tensor=WAYS[way])
    config = settings(SHAPE, 1).model_copy(update={"parallel": parallel})
    job, layout = Job(config, 128, LENGTH), Layout(parallel, config.memory, ROWS, 1, 1)
    inner = Share(rank=1, blocks=1, first=False, last=False, in_flight=1.0)
    group = Group(RANKS, RANKS, 1e9)
    axis = tensor_axis(job, layout, inner, group, products=0.0)
    assert axis.bytes == sum(sent(call.kind, call.bytes, RANKS) for call in counted[way])
    assert axis.exposed == axis.seconds
    slow = tensor_axis(job, layout, inner, group, products=10 * axis.seconds)
    assert slow.exposed == pytest.approx(0.0 if WAYS[way] else axis.seconds)
    little = tensor_axis(job, layout, inner, group, products=axis.seconds / 10)
    assert little.exposed == pytest.approx(axis.seconds * (1 - 2 * 3 / 4 / 10 if WAYS[way] else 1))
