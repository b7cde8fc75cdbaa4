"""Offload to the host on one worker: the same bits as without it, for every kind of step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.test_step import MODEL, VOCABULARY, micro, rows
from tidewheel.errors import ConfigError
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.parallel import local
from tidewheel.train.parallel.fully_shard import FullyShard
from tidewheel.train.parallel.mesh import close_own_group
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import train_step

WIDE = {**MODEL.canonical(), "dim": 256, "ffn_dim": 256, "num_layers": 1}
"""Matrices whose rows are blocks of 256, which 8-bit moments need."""
CASES: dict[str, dict[str, Any]] = {
    "fp32": {}, "bf16 products": {"precision": "bf16"}, "bf16 parameters": {"precision": "bf16", "parameters": "bf16"},
    "reproducible": {"reproducible": True}, "tied": {"model": {**MODEL.canonical(), "tie_embeddings": True}},
    "whole gradients": {"parallel": {"reduce": "step"}},
    "8-bit moments": {"model": WIDE, "optimizer": {"kind": "adamw8bit"}},
    "paged 8-bit moments": {"model": WIDE, "optimizer": {"kind": "adamw8bit", "paged": True}}}


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    close_own_group()
    assert not dist.is_initialized()


def after_steps(case: dict[str, Any], layout: dict[str, Any], rank: int = 0, world_size: int = 1,
                ) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint after three steps of the same 8 rows in micro-batches of 2."""
    config = TrainConfig.model_validate({"model": MODEL.canonical(), **case, "elastic": {"max_workers": 2},
                                         "parallel": {**case.get("parallel", {}), **layout}})
    runtime = Runtime(rank, world_size)
    model = parallel.build(config, VOCABULARY, runtime)
    parallel.init_weights(model, 3)
    optimizer, collectives = build_optimizer(model, config.optimizer), Collectives(runtime)
    optimizer.started()
    for seed in range(3):
        parts = rows(8, seed)
        batches = [micro(parts, begin, begin + 2, begin // 2) for begin in range(0, 8, 2)]
        train_step(model, optimizer, batches, collectives, virtual_ranks=4, clip_norm=0.5, precision=config.precision)
    assert isinstance(model.data[0], FullyShard) == config.parallel.offload
    return {f"{group}/{name}": local(tensor).clone() for group, tensors in training_state(model, optimizer).items()
            for name, tensor in tensors.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("data", ["zero2", "zero3"])
def test_one_worker_offloads_without_changing_a_bit(case: str, data: str):
    here = after_steps(CASES[case], {"data": data, **({"reduce": "auto"} if "reduce" in CASES[case] else {})})
    offloaded = after_steps(CASES[case], {"data": data, "offload": True})
    assert set(here) == set(offloaded)
    for name, tensor in here.items():
        assert torch.equal(tensor, offloaded[name]), name


def shared_tensors(case: dict[str, Any]) -> None:
    """On two ranks that share tensors: offloaded and not."""
    rank = dist.get_rank()
    here = after_steps(case, {"data": "zero2", "tensor": 2, "reduce": "step"}, rank, 2)
    offloaded = after_steps(case, {"data": "zero2", "tensor": 2, "reduce": "step", "offload": True}, rank, 2)
    for name, tensor in here.items():
        assert torch.equal(tensor, offloaded[name]), name


@pytest.mark.long
def test_ranks_of_tensor_parallelism_offload():
    on_ranks(2, shared_tensors, CASES["fp32"])


def test_a_pipeline_of_one_data_rank_is_refused():
    from tidewheel.train.parallel.building import parallelize
    from tidewheel.train.parallel.mesh import Mesh

    config = TrainConfig.model_validate({"model": MODEL.canonical(), "parallel": {"data": "zero2", "offload": True}})
    with torch.device("meta"):
        from tidewheel.models.decoder import Decoder

        whole = Decoder(MODEL, VOCABULARY)
    mesh = Mesh({"pipeline": 2, "replicate": 1, "shard": 1, "context": 1, "tensor": 1}, 0, None)
    with pytest.raises(ConfigError, match="at least two workers that shard"):
        parallelize(whole, config, mesh, torch.device("cpu"), 1)
