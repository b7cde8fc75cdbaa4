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
    """Checkpoints that compare a kept state with its copy, at the last moment before it may change."""

    def __init__(self) -> None:
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.compared = self.changed = 0

    def keeps(self, step: int) -> bool:
        return True

    def keep(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        parts = [local(tensor).detach() for group in state.values() for tensor in group.values()]
        self.changed += any(not same_bits(now, before) for now, before in self.given)
        self.given = [(part, part.clone()) for part in parts]

    def settle(self) -> None:
        self.compared += bool(self.given)
        assert all(same_bits(now, before) for now, before in self.given)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8) if a.numel() else a,
                       b.reshape(-1).view(torch.uint8) if b.numel() else b)


def check(folder: Path, name: str, overrides: tuple[str, ...], **rank: int) -> None:
    watching = Watching()
    settings = config(folder, name, *overrides)
    train(settings, Runtime(checkpoints=watching, **rank))
    assert watching.compared == settings.steps - 1  # before each update except the first
    assert watching.changed == settings.steps - 1  # so the comparison would detect an update


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("settle")
    write_shards(base / "shards")
    write_shards(base / "validation", shards=1, rows=11, seed=1)
    return base


@pytest.mark.parametrize("name", CASES)
def test_state_is_only_read_before_it_settles(folder: Path, name: str):
    check(folder, f"alone-{list(CASES).index(name)}", CASES[name])


def every_layout(folder: Path) -> None:
    for index, overrides in enumerate(LAYOUTS.values()):
        check(folder, f"ranks-{index}", ("steps=4", *overrides), rank=dist.get_rank(), world_size=dist.get_world_size())


def test_state_is_only_read_before_it_settles_in_every_layout(folder: Path):
    on_ranks(2, every_layout, folder)
