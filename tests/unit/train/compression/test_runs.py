"""Compression in whole runs: a part of the user's own, checkpoints, the memory tier, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tidewheel as tw
from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.folding import Folding
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.client import MemoryTier
from tidewheel.checkpoint.memory_tier.restore import inventory, load, newest_complete
from tidewheel.errors import ConfigError
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.parallel import building
from tidewheel.train.runtime import SUMMED, Runtime

TOKEN = "secret"


class OwnSigns(tw.Compression):
    """Send the sign of each element, and one size for all of them."""

    NOT_REPRODUCIBLE = ""

    def sum(self, values: torch.Tensor, at: tw.At) -> tw.Exchange:
        sizes = values.abs().mean(dim=1, keepdim=True)
        signs = values.sign()
        values -= signs * sizes
        signs, sizes = yield tw.Gather(signs.char(), sizes)
        total = torch.zeros_like(values[0])
        for sign, size in zip(signs.unbind(), sizes.unbind()):
            total += sign * size
        return total


class Mistaken(tw.Compression):
    """Has a mistake."""

    def sum(self, values: torch.Tensor, at: tw.At) -> tw.Exchange:
        yield tw.Gather(values.wrong)  # type: ignore[attr-defined]
        return values[0]


def shown(folder: Path, run: str, part: str, *overrides: str) -> TrainConfig:
    return config(folder, run, f"compression={{kind: {part}, smallest: 512}}", "parallel.data=ddp",
                  "evaluation.every_steps=0", "elastic.max_workers=1", *overrides)


def finished(wanted: TrainConfig, generation: int = 0) -> float:
    checkpoints = CheckpointManager(storage.store(wanted.run_uri).child("checkpoints"), asynchronous=False)
    return train(wanted, Runtime(checkpoints=checkpoints, generation=generation)).loss


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compressed")
    write_shards(folder / "shards")
    write_shards(folder / "validation", shards=1, seed=5)
    return folder


def test_a_run_continues_as_if_it_had_not_stopped(data: Path):
    whole = finished(shown(data, "whole", "power_sgd", "compression.rank=2"))
    stopped = finished(shown(data, "stopped", "power_sgd", "compression.rank=2", "steps=3",
                             "schedule={kind: constant, warmup_steps: 1}"))
    again = finished(shown(data, "stopped", "power_sgd", "compression.rank=2",
                           "schedule={kind: constant, warmup_steps: 1}"), 1)
    straight = finished(shown(data, "straight", "power_sgd", "compression.rank=2",
                              "schedule={kind: constant, warmup_steps: 1}"))
    assert again == straight
    assert len({whole, stopped, straight}) == 3
    lines = [line for line in jsonlog.read(storage.store(data / "runs/whole"), "metrics.jsonl") if "loss" in line]
    assert [line["gradient_bytes"] for line in lines] == [0] * len(lines), "one worker sends nothing"


def test_a_run_does_not_continue_with_another_compression(data: Path):
    finished(shown(data, "other", "topk", "steps=2"))
    for changes in (["compression.density=0.5"], ["compression=null"]):
        with pytest.raises(ConfigError, match="other settings of: compression"):
            finished(shown(data, "other", "topk", "steps=4", *changes), 1)


def test_a_compression_of_the_users_own(data: Path):
    own = f"{__name__}:OwnSigns"
    assert finished(shown(data, "own", own, "reproducible=true")) > 0
    with pytest.raises(ConfigError, match=r"Mistaken failed: AttributeError.*wrong"):
        finished(shown(data, "mistaken", f"{__name__}:Mistaken"))
    with pytest.raises(ConfigError, match="does not say that it depends on slots alone"):
        shown(data, "refused", f"{__name__}:Mistaken", "reproducible=true")


def test_settings_that_compress_nothing_are_refused():
    values: dict[str, Any] = {"kind": "topk", "only": ["blocks.*.wrong"]}
    wanted = tw.Train({}, compression=values, parallel={"data": "ddp"}, data="shards",
                      model={"preset": "debug"}).resolve()
    with pytest.raises(ConfigError, match=r"compresses none of the \d+ parameters"):
        building.build(wanted, 64, Runtime())


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4), (3, 1), (1, 1), (5, 3)])
def test_rows_are_folded_so_that_their_sum_stays(before: int, now: int):
    saved, here = torch.randn(before, 6), torch.full((now, 6), 9.0)
    path = f"{SUMMED}w"
    folding = Folding({path: here, "model/w": here}, {path: saved, "model/w": saved})  # type: ignore[dict-item]
    assert folding.tensors["model/w"] is here
    folding.tensors[path].copy_(saved)
    folding.add_up()
    torch.testing.assert_close(here.sum(dim=0), saved.sum(dim=0))
    if before == now:
        assert torch.equal(here, saved)


def test_the_memory_tier_folds_too():
    agents = [Agent("127.0.0.1", TOKEN, "folding") for _ in range(2)]
    saved = torch.randn(3, 40)
    try:
        tier = MemoryTier(dict(enumerate(agent.address for agent in agents)), agents[0].address, [agents[1].address],
                          0, 1, TOKEN, generation=0)
        tier.snapshot(1, {"compression": {"residual/w": saved, "count": torch.tensor(7)}}, {"step": 1})
        assert tier.flush()
        state = {"compression": {"residual/w": torch.ones(2, 40), "count": torch.tensor(0)}}
        recoverable = newest_complete(inventory([agent.address for agent in agents], TOKEN))
        assert recoverable is not None
        assert load(recoverable, state) == {"step": 1}
        torch.testing.assert_close(state["compression"]["residual/w"].sum(dim=0), saved.sum(dim=0))
        assert state["compression"]["count"] == 7
        tier.close()
    finally:
        for agent in agents:
            agent.stop()
