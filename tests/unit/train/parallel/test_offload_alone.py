"""Offload to the host on one worker: the same bits as without it, for every kind of step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.test_step import MODEL, VOCABULARY, micro, rows
from tidewheel.errors import ConfigError
from tidewheel.models.decoder import Decoder
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.parallel import local
from tidewheel.train.parallel.building import parallelize
from tidewheel.train.parallel.fully_shard import FullyShard
from tidewheel.train.parallel.mesh import Mesh, close_own_group
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import train_step

WIDE = {**MODEL.canonical(), "dim": 256, "ffn_dim": 256, "num_layers": 1}
"""Matrices whose rows are blocks of 256, which 8-bit moments need."""
CASES: dict[str, dict[str, Any]] = {
    "fp32": {}, "bf16 products": {"precision": "bf16"}, "bf16 parameters": {"precision": "bf16", "parameters": "bf16"},
    "reproducible": {"reproducible": True}, "tied": {"model": {**MODEL.canonical(), "tie_embeddings": True}},
    "adapter": {"adapter": {"kind": "lora", "rank": 4}}, "whole gradients": {"parallel": {"reduce": "step"}},
    "8-bit moments": {"model": WIDE, "optimizer": {"kind": "adamw8bit"}},
    "paged 8-bit moments": {"model": WIDE, "optimizer": {"kind": "adamw8bit", "paged": True}}}

QUICK = ("fp32", "bf16 parameters", "reproducible", "8-bit moments")


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    close_own_group()
    assert not dist.is_initialized()


def after_steps(case: dict[str, Any], layout: dict[str, Any], rank: int = 0, world_size: int = 1,
                disk: Path | None = None) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint after three steps of the same 8 rows in micro-batches of 2."""
    config = TrainConfig.model_validate({"model": MODEL.canonical(), **case, "elastic": {"max_workers": 2},
                                         "parallel": {**case.get("parallel", {}), **layout}})
    runtime = Runtime(rank, world_size)
    model = parallel.build(config, VOCABULARY, runtime)
    parallel.init_weights(model, 3)
    optimizer, collectives = build_optimizer(model, config.optimizer), Collectives(runtime)
    if disk is not None:
        optimizer.move_to_disk(disk)
    optimizer.started()
    for seed in range(3):
        parts = rows(8, seed)
        batches = [micro(parts, begin, begin + 2, begin // 2) for begin in range(0, 8, 2)]
        train_step(model, optimizer, batches, collectives, virtual_ranks=4, clip_norm=0.5, precision=config.precision)
    assert isinstance(model.data[0], FullyShard) or not config.parallel.offload
    return {f"{group}/{name}": local(tensor).clone() for group, tensors in training_state(model, optimizer).items()
            for name, tensor in tensors.items()}


@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.long)
                                  for case in CASES])
def test_one_worker_offloads_without_changing_a_bit(case: str, tmp_path: Path):
    """To the host, and with the optimizer's state on disk."""
    data = "zero2" if "parallel" in CASES[case] else "zero3"
    here = after_steps(CASES[case], {"data": data})
    offloaded = after_steps(CASES[case], {"data": data, "offload": True})
    on_disk = after_steps(CASES[case], {"data": data, "offload": True}, disk=tmp_path)
    assert set(here) == set(offloaded) == set(on_disk)
    for name, tensor in here.items():
        assert torch.equal(tensor, offloaded[name]), name
        assert torch.equal(tensor, on_disk[name]), name


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"data": "zero2", "tensor": 2, "reduce": "step"}, "zero3": {"data": "zero3", "reduce": "micro_batch"}}


def two_ranks(layout: dict[str, Any], folder: Path) -> None:
    """Compare offload, and offload with state on disk, with neither."""
    rank = dist.get_rank()
    for case in ("fp32", "bf16 parameters"):
        here = after_steps(CASES[case], layout, rank, 2)
        offloaded = after_steps(CASES[case], {**layout, "offload": True}, rank, 2)
        on_disk = after_steps(CASES[case], {**layout, "offload": True}, rank, 2, folder)
        for name, tensor in here.items():
            assert torch.equal(tensor, offloaded[name]), (case, name)
            assert torch.equal(tensor, on_disk[name]), (case, name)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_offload_without_changing_a_bit(layout: str, tmp_path: Path):
    on_ranks(2, two_ranks, LAYOUTS[layout], tmp_path)


def test_a_pipeline_of_one_data_rank_is_refused():
    config = TrainConfig.model_validate({"model": MODEL.canonical(), "parallel": {"data": "zero2", "offload": True}})
    with torch.device("meta"):
        whole = Decoder(MODEL, VOCABULARY)
    mesh = Mesh({"pipeline": 2, "replicate": 1, "shard": 1, "context": 1, "tensor": 1}, 0, None)
    with pytest.raises(ConfigError, match="at least two workers that shard"):
        parallelize(whole, config, mesh, torch.device("cpu"), 1)
