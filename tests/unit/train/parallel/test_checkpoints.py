"""A checkpoint of one layout loads into another, bit for bit, the optimizer's state included.

Each layout reads that of plain data parallelism and is read by it, and two others: all pairs would take a minute.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.ranks import on_ranks
from tests.unit.train.test_step import MODEL, VOCABULARY, micro, rows
from tidewheel import storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.parallel.data_parallel import Replicated
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import train_step

# zero2 places everything as zero3 does
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"data": "ddp"}, "zero1": {"data": "zero1"}, "hsdp": {"data": "zero3", "replicate": 2},
    "zero3": {"data": "zero3", "offload": True},
    "tensor context": {"tensor": 2, "context": 2},
    "pipeline x zero1": {"data": "zero1", "pipeline": 2, "pipeline_schedule": "zbv_zero_bubble"}}


def opened(layout: dict[str, Any], seed: int):
    config = TrainConfig.model_validate({"model": MODEL.canonical(), "parallel": layout,
                                         "elastic": {"max_workers": 4}})
    model = parallel.build(config, VOCABULARY, Runtime(dist.get_rank(), dist.get_world_size()))
    parallel.init_weights(model, seed)
    return model, build_optimizer(model, config.optimizer)


def step(model, adamw, seed: int) -> None:
    rank, parts = model.mesh.data_rank, rows(8, seed)
    train_step(model, adamw, [micro(parts, 2 * rank, 2 * rank + 2, rank)], Collectives(
        Runtime(dist.get_rank(), dist.get_world_size())), virtual_ranks=4, clip_norm=0.5)


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{group}/{name}": (t.full_tensor() if isinstance(t, DTensor) else t).clone()
            for group, tensors in state.items() for name, t in tensors.items()}


def of_all_ranks(mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Merge the tensors of all ranks; each pipeline stage has some of the names."""
    everyone: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {name: value for tensors in everyone for name, value in tensors.items()}


def manager(folder: Path, name: str) -> CheckpointManager:
    return CheckpointManager(storage.store(folder / name), asynchronous=False)


def every_layout(folder: Path) -> None:
    saved = {}
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        model, adamw = opened(layout, seed=number)
        step(model, adamw, seed=number)
        state = training_state(model, adamw)
        saved[name] = of_all_ranks(whole(state))
        manager(folder, name).save(1, state, {"step": 1})
    for number, layout in enumerate(LAYOUTS.values()):
        model, adamw = opened(layout, seed=99)
        state = training_state(model, adamw)
        for other, (name, expected) in enumerate(saved.items()):
            if number and other and (number - other) % len(LAYOUTS) not in (1, 4):
                continue
            assert manager(folder, name).load_latest(state) == {"step": 1}
            model.refresh()
            for key, value in whole(state).items():
                assert torch.equal(value, expected[key]), (layout, name, key)
            if isinstance(model.data[0], Replicated):  # what the forward pass uses
                for key, parameter in model.parts[0].named_parameters():
                    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                    assert torch.equal(value, expected[f"model/{key}"]), (layout, name, key)


def test_every_layout_loads_the_checkpoints_of_every_other(tmp_path: Path):
    on_ranks(4, every_layout, tmp_path)
    last = CheckpointManager(storage.store(tmp_path / "zero1"), asynchronous=False)
    config = TrainConfig(model=MODEL)
    model = parallel.build(config, VOCABULARY, Runtime())
    assert last.load_latest(training_state(model, build_optimizer(model, config.optimizer))) == {"step": 1}
