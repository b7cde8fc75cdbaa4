"""Tests that training only reads its state between `keep` and `settle`, so that a late copy is the step's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.helpers import config, write_shards
from tidewheel.train.loop import train
from tidewheel.train.parallel import local
from tidewheel.train.runtime import NoCheckpoints, Runtime

pytestmark = pytest.mark.timeout(240)

CASES = {
    "adamw": (), "rollback is possible": ("guards.spike=rollback",), "adafactor": ("optimizer.kind=adafactor",),
    "adamw8bit": ("optimizer.kind=adamw8bit",), "lion": ("optimizer.kind=lion",), "muon": ("optimizer.kind=muon",),
    "bf16 parameters": ("precision=bf16", "parameters=bf16"), "fp16": ("precision=fp16",),
    "reproducible": ("reproducible=true",)}
LAYOUTS = {
    "zero3": ("parallel.data=zero3",), "zero2, offloaded": ("parallel.data=zero2", "parallel.offload=true"),
    "ddp": ("parallel.data=ddp",), "zero1": ("parallel.data=zero1",), "tensor": ("parallel.tensor=2",),
    "pipeline": ("parallel.pipeline=2",), "context": ("parallel.context=2",)}


class Watching(NoCheckpoints):
    """Compares what it was given with how it was then, at the last moment before it may change."""

    def __init__(self) -> None:
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.compared = self.changed = 0

    def keeps(self, step: int) -> bool:
        return True

    def keep(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        parts = [local(tensor).detach() for group in state.values() for tensor in group.values()]
        self.changed += any(not same(now, before) for now, before in self.given)
        self.given = [(part, part.clone()) for part in parts]

    def settle(self) -> None:
        self.compared += bool(self.given)
        assert all(same(now, before) for now, before in self.given)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8) if one.numel() else one,
                       other.reshape(-1).view(torch.uint8) if other.numel() else other)


def check(folder: Path, name: str, overrides: tuple[str, ...], **place: int) -> None:
    found = Watching()
    settings = config(folder, name, *overrides)
    train(settings, Runtime(checkpoints=found, **place))
    assert found.compared == settings.steps - 1  # before each update but the first
    assert found.changed == settings.steps - 1  # so the comparison would have seen an update


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("settle")
    write_shards(found / "shards")
    write_shards(found / "validation", shards=1, rows=11, seed=1)
    return found


@pytest.mark.parametrize("name", CASES)
def test_state_is_only_read_before_it_settles(folder: Path, name: str):
    check(folder, f"alone-{list(CASES).index(name)}", CASES[name])


def every_layout(folder: Path) -> None:
    for number, overrides in enumerate(LAYOUTS.values()):
        check(folder, f"ranks-{number}", overrides, rank=dist.get_rank(), world_size=dist.get_world_size())


def test_and_so_in_every_layout(folder: Path):
    on_ranks(2, every_layout, folder)
