"""Inputs of blocks on disk in every layout: the same bits as with the inputs in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.parallel.test_offload_alone import CASES, after_steps
from tests.unit.train.test_step import MODEL
from tidewheel.train.memory import input_stores
from tidewheel.train.memory.scratch_file import DirectFile
from tidewheel.train.parallel.mesh import close_own_group
from tidewheel.train.parallel.stages import SCHEDULES

DEEP = {**MODEL.canonical(), "num_layers": 6}
QUICK = ("fp32", "bf16 parameters", "reproducible")


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    close_own_group()


def must_be_equal(case: dict[str, Any], layout: dict[str, Any], folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare all tensors of a checkpoint, and check that the disk was used."""
    sizes: list[int] = []

    class Counted(DirectFile):
        def __init__(self, folder: Path, size: int) -> None:
            sizes.append(size)
            super().__init__(folder, size)

    deep = {"model": DEEP, **case} if "model" not in case else case
    here = after_steps({**deep, "memory": {"activation_checkpointing": "full"}}, layout, rank, ranks)
    assert not sizes
    original, input_stores.DirectFile = input_stores.DirectFile, Counted  # type: ignore[misc]
    try:
        on_disk = after_steps({**deep, "memory": {"activation_checkpointing": "offload",
                                                  "activation_disk": str(folder)}}, layout, rank, ranks)
    finally:
        input_stores.DirectFile = original  # type: ignore[misc]
    assert sizes, (case, layout)
    assert set(here) == set(on_disk)
    for name, tensor in here.items():
        assert torch.equal(tensor, on_disk[name]), (case, layout, name)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.long)
                                  for case in CASES])
def test_one_worker(case: str, tmp_path: Path):
    data = "zero2" if "parallel" in CASES[case] else "ddp"
    must_be_equal(CASES[case], {"data": data}, tmp_path)


LAYOUTS: dict[str, tuple[dict[str, Any], ...]] = {
    "data": ({"data": "zero1"}, {"data": "zero3", "reduce": "micro_batch"}, {"data": "zero3", "offload": True}),
    "tensor": ({"data": "zero2", "tensor": 2, "reduce": "step"}, {"data": "ddp", "tensor": 2}),
    "context": tuple({"data": "zero2", "context": 2, "context_method": method} for method in ("all_gather", "ring")),
    "pipeline": tuple({"data": "zero2", "pipeline": 2, "pipeline_schedule": schedule} for schedule in SCHEDULES)}


def two_ranks(layouts: tuple[dict[str, Any], ...], folder: Path) -> None:
    for layout in layouts:
        must_be_equal({}, layout, folder, dist.get_rank(), 2)


@pytest.mark.parametrize("layouts", [layouts if layouts == "data" else
                                     pytest.param(layouts, marks=pytest.mark.long) for layouts in LAYOUTS])
def test_two_workers(layouts: str, tmp_path: Path):
    on_ranks(2, two_ranks, LAYOUTS[layouts], tmp_path)
