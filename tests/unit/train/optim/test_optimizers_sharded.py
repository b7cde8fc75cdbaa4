"""Tests that optimizers of sharded parameters equal one process, and that their checkpoints fit any layout."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks import on_ranks
from tests.unit.train.optim.test_fused import FACTOR, fuse, update
from tests.unit.train.optim.test_optimizers import KINDS, Weights, made
from tidewheel import storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.errors import ConfigError
from tidewheel.train import optimizers
from tidewheel.train.optim.build import build_optimizer, training_state

RANKS, STEPS = 4, 3
LAYOUTS = {"rows": ((RANKS,), ("shard",)), "replicas": ((2, 2), ("replicate", "shard")),
           "tensor and rows": ((2, 2), ("shard", "tensor"))}
EXACT = {"sgd", "adam", "adamw", "ademamix", "lion", "adamw8bit"}
"""Optimizers that work element-wise or by row: the same bits for any sharding."""


class Spread(Weights):
    """Return the same parameters as DTensors, sharded by FSDP2 and, in some layouts, by tensor parallelism before."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        mesh, names = init_device_mesh("cpu", LAYOUTS[layout][0], mesh_dim_names=LAYOUTS[layout][1]), list(self.held)
        module = nn.Module()
        for number, (name, value) in enumerate(self.held.items()):
            if "tensor" in LAYOUTS[layout][1]:  # by columns, by rows, or not at all
                kind = Shard(1) if name == "output.weight" else Replicate() if "norm" in name else Shard(0)
                value = nn.Parameter(distribute_tensor(value.detach(), mesh["tensor"], [kind], src_data_rank=None))
            module.register_parameter(str(number), value)
        fully_shard(module, mesh=mesh["shard"] if "tensor" in LAYOUTS[layout][1] else mesh)
        self.held = dict(zip(names, module.parameters()))

    def gradients(self, step: int) -> dict[str, torch.Tensor]:
        return {name: distribute_tensor(gradient, self.held[name].device_mesh, self.held[name].placements,
                                        src_data_rank=None) for name, gradient in super().gradients(step).items()}


CASES = [(kind, layout) for kind in KINDS for layout in LAYOUTS if layout == "rows" or kind not in EXACT]


def manager(folder: str) -> CheckpointManager:
    return CheckpointManager(storage.store(folder), asynchronous=False)


def apart(spread: Weights, kind: str) -> float:
    """Return the largest difference from the weights of one process."""
    whole, optimizer = made(kind)
    whole.take(optimizer, range(STEPS))
    return max((value.full_tensor() - whole.held[name]).abs().max().item() for name, value in spread.held.items())


def a_rank(folder: str) -> None:
    """Run every case, and save one checkpoint of all before the last step."""
    runs = {}
    for kind, layout in CASES:
        spread = Spread(layout)
        optimizer = build_optimizer(spread, optimizers.KIND.build(kind))
        spread.take(optimizer, range(STEPS - 1))
        runs[f"{kind} {layout}"] = (kind, spread, optimizer)
    manager(folder).save(1, {name: training_state(spread, optimizer) for name, (_, spread, optimizer) in runs.items()},
                         {})
    results = {}
    for name, (kind, spread, optimizer) in runs.items():
        spread.take(optimizer, range(STEPS - 1, STEPS))
        results[name] = [apart(spread, kind)]
    for kind, layout in CASES:
        other = Spread("rows")
        runs[f"{kind} {layout}"] = (kind, other, build_optimizer(other, optimizers.KIND.build(kind)))
    manager(folder).load_latest({name: training_state(spread, optimizer)
                                 for name, (_, spread, optimizer) in runs.items()})
    for name, (kind, spread, optimizer) in runs.items():
        optimizer.restored()
        spread.take(optimizer, range(STEPS - 1, STEPS))
        results[name].append(apart(spread, kind))
    with pytest.MonkeyPatch.context() as patch:
        fuse(patch)
        for kind, layout in CASES:
            spread = Spread(layout)
            optimizer = build_optimizer(spread, optimizers.KIND.build(kind))
            assert optimizer.skips_on_device
            for step in range(STEPS):
                update(spread, optimizer, step, FACTOR)
            fuse(patch, on=False)
            results[f"{kind} {layout}"].append(apart(spread, kind))
            fuse(patch)
    with pytest.raises(ConfigError, match="cut into columns of 128"):
        build_optimizer(Spread("tensor and rows"), optimizers.KIND.build("adamw8bit"))
    if torch.distributed.get_rank() == 0:
        (Path(folder) / "found.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("sharded")
    on_ranks(RANKS, a_rank, str(folder))
    return folder, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_sharded_updates_equal_those_of_one_process(found, kind: str, layout: str):
    straight, resumed, fused = found[1][f"{kind} {layout}"]
    bound = 0.0 if kind in EXACT else 2e-5
    assert straight <= bound
    assert fused <= 2e-5
    assert resumed <= bound, "saved in this layout, continued with rows on four ranks"


def test_one_process_continues_what_four_ranks_saved(found):
    runs = {f"{kind} {layout}": (kind, *made(kind)) for kind, layout in CASES}
    manager(str(found[0])).load_latest({name: training_state(weights, optimizer)
                                        for name, (_, weights, optimizer) in runs.items()})
    for name, (kind, weights, optimizer) in runs.items():
        optimizer.restored()
        weights.take(optimizer, range(STEPS - 1, STEPS))
        whole, other = made(kind)
        whole.take(other, range(STEPS))
        for part, expected in whole.held.items():
            bound = 0.0 if kind in EXACT else 2e-5
            torch.testing.assert_close(weights.held[part], expected, rtol=0, atol=bound, msg=f"{name} {part}")
