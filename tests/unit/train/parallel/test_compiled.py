"""Compiled blocks under each kind of parallelism: no graph break, one compilation, the losses of one process.

The backend is AOTAutograd without inductor: graphs are captured, guarded and split into forward and backward as always.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import config, train
from tidewheel.train.compile import compile_blocks
from tidewheel.train.parallel import building

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"data": "zero3"}, {"tensor": 2}, *({"context": 2, "context_method": method}
                                       for method in ("all_gather", "all_to_all", "ring")))
STEPS = 3


EXPERTS = {"kind": "mixtral", "ffn_dim": 64, "num_experts": 4, "experts_per_token": 2}


@pytest.mark.long
def test_blocks_whose_experts_are_shared_are_compiled_in_two_graphs():
    on_ranks(2, _shared_experts)


def _shared_experts() -> None:
    _, expected = train(config({}, model=EXPERTS), 1, STEPS)
    counters.clear()
    with mock.patch.object(building, "compile_blocks", functools.partial(compile_blocks, backend="aot_eager")):
        _, results = train(config({"data": "zero3", "expert": 2}, model=EXPERTS, compile=True), 2, STEPS)
    assert all("AllToAll.__call__" in reason for reason in counters["graph_break"]), dict(counters["graph_break"])
    assert counters["aot_autograd"]["ok"] == counters["aot_autograd"]["total"] > 1
    for ours, theirs in zip(results, expected):
        assert abs(ours.loss / theirs.loss - 1) < 1e-5, f"loss {ours.loss}, not {theirs.loss}"


@pytest.mark.long
def test_blocks_are_compiled_once_and_whole():
    on_ranks(2, _every_layout)


def _every_layout() -> None:
    _, expected = train(config({}), 1, STEPS)
    for layout in LAYOUTS:
        torch._dynamo.reset()
        counters.clear()
        with mock.patch.object(building, "compile_blocks", functools.partial(compile_blocks, backend="aot_eager")):
            _, results = train(config(layout, compile=True), dist.get_world_size(), STEPS)
        assert not counters["graph_break"], f"{layout}: {dict(counters['graph_break'])}"
        assert counters["stats"]["unique_graphs"] == 1, f"{layout}: compiled again: {dict(counters['stats'])}"
        assert counters["aot_autograd"]["ok"] == counters["aot_autograd"]["total"] == 1, layout
        for ours, theirs in zip(results, expected):
            assert abs(ours.loss / theirs.loss - 1) < 1e-5, f"{layout}: loss {ours.loss}, not {theirs.loss}"
