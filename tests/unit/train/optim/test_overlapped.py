"""Updates during the backward pass: the same bits as after it, for every kind of step that may have them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tidewheel as tw
from tests.ranks import on_ranks
from tests.unit.train.helpers import config as run_config
from tests.unit.train.helpers import write_shards
from tests.unit.train.parallel.test_offload_alone import CASES
from tests.unit.train.test_step import MODEL, VOCABULARY, micro, rows
from tidewheel.config import build
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.optim.overlapped import overlap
from tidewheel.train.optimizers.rules import host_adam
from tidewheel.train.parallel import local
from tidewheel.train.parallel.mesh import close_own_group
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import train_step

NEEDED: dict[str, Any] = {"guards": {"non_finite": "stop"}}
OVERLAPPED = ("fp32", "bf16 products", "bf16 parameters", "tied", "adapter", "whole gradients", "8-bit moments")
QUICK = ("fp32", "bf16 parameters", "8-bit moments")
MICRO_BATCHES = 3


class Undeclared(tw.Optimizer):
    """An optimizer that does not say whether its update communicates."""


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    close_own_group()
    assert not dist.is_initialized()


def configured(case: dict[str, Any], layout: dict[str, Any]) -> TrainConfig:
    optimizer = {**case.get("optimizer", {}), "clip_norm": 0}
    return build(TrainConfig, {"model": MODEL.canonical(), **case, **NEEDED, "optimizer": optimizer,
                               "elastic": {"max_workers": 4},
                               "parallel": {**case.get("parallel", {}), "offload": True, **layout}})


def after_steps(config: TrainConfig, rank: int = 0, world_size: int = 1) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Return all tensors of a checkpoint after three steps, and the losses and norms of these."""
    runtime = Runtime(rank, world_size)
    model = parallel.build(config, VOCABULARY, runtime)
    parallel.init_weights(model, 3)
    optimizer, collectives = build_optimizer(model, config.optimizer), Collectives(runtime)
    optimizer.started()
    overlaps = config.parallel.overlap_update
    if overlaps:
        overlap(optimizer, model.data)
    results: list[Any] = []
    for seed in range(3):
        parts = rows(2 * MICRO_BATCHES, seed)
        batches = [micro(parts, begin, begin + 2, begin // 2) for begin in range(0, 2 * MICRO_BATCHES, 2)]
        optimizer.set_learning_rate(1e-2 / (1 + seed))
        result = train_step(model, optimizer, batches, collectives, virtual_ranks=MICRO_BATCHES,
                            precision=config.precision)
        results.append((result.loss, result.gradient_norm, result.targets))
        if overlaps:
            assert optimizer.overlapped is not None
            assert optimizer.overlapped.during > 1, "updates begin before the backward pass ends"
    if optimizer.overlapped is not None:
        optimizer.overlapped.close()
    return {f"{group}/{name}": local(tensor).clone() for group, tensors in training_state(model, optimizer).items()
            for name, tensor in tensors.items()}, results


def assert_same(case: str, layout: dict[str, Any], rank: int = 0, world_size: int = 1) -> None:
    expected = after_steps(configured(CASES[case], layout), rank, world_size)
    actual = after_steps(configured(CASES[case], {**layout, "overlap_update": True}), rank, world_size)
    assert actual[1] == expected[1]
    assert actual[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        assert torch.equal(actual[0][name], tensor), (case, name)


@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.long)
                                  for case in OVERLAPPED])
def test_an_update_during_the_backward_pass_changes_no_bit(case: str):
    assert_same(case, {"data": "zero2" if "parallel" in CASES[case] else "zero3"})


def test_the_kernel_of_offloaded_parameters_updates_layer_by_layer(monkeypatch: pytest.MonkeyPatch):
    """It is chosen where a GPU computes; here the CPU stands in for one."""
    monkeypatch.setattr(host_adam, "is_offloaded", lambda groups: True)
    assert_same("fp32", {"data": "zero3"})


LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {
    2: ({"data": "zero3", "reduce": "micro_batch"}, {"data": "zero2", "reduce": "step"},
        {"data": "zero2", "tensor": 2, "reduce": "step"}),
    4: ({"data": "zero2", "replicate": 2}, {"data": "zero3", "replicate": 2, "reduce": "micro_batch"})}


def several_ranks() -> None:
    for layout in LAYOUTS[dist.get_world_size()]:
        for case in ("fp32", "bf16 parameters"):
            assert_same(case, layout, dist.get_rank(), dist.get_world_size())


@pytest.mark.long
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_several_ranks_update_during_the_backward_pass(ranks: int):
    on_ranks(ranks, several_ranks)


def test_the_thread_ends_with_its_generation(tmp_path: Path):
    write_shards(tmp_path / "shards")
    fit_local(run_config(tmp_path, "run", "parallel={data: zero3, offload: true, overlap_update: true}",
                         "optimizer.clip_norm=0", "guards.non_finite=stop", "steps=2", "evaluation.every_steps=0",
                         'data.validation=""'))
    threads = [thread for thread in threading.enumerate() if thread.name == "updates"]
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(("changes", "hint"), [
    ({"parallel": {"data": "zero2", "overlap_update": True}}, "nearest legal choice: offload true"),
    ({"optimizer": {"clip_norm": 1.0}}, "nearest legal choice: clip_norm 0, or overlap_update false"),
    ({"guards": {"non_finite": "skip"}}, "guards.non_finite stop and guards.spike ignore"),
    ({"precision": "fp16"}, "nearest legal choice: precision bf16"),
    ({"reproducible": True}, "nearest legal choice: overlap_update false"),
    *(({"optimizer": {"kind": kind, "clip_norm": 0}}, "nearest legal choice: adamw, or overlap_update false")
      for kind in ("muon", "adafactor", "tests.unit.train.optim.test_overlapped:Undeclared")),
    ({"memory": {"optimizer_disk": "/tmp"}, "checkpoint": {"memory_tier": {"every_steps": 0}}}, "piece by piece")])
def test_what_would_change_a_result_is_refused(changes: dict[str, Any], hint: str):
    values = {"model": MODEL.canonical(), **NEEDED, "optimizer": {"clip_norm": 0},
              "parallel": {"data": "zero3", "offload": True, "overlap_update": True}}
    assert build(TrainConfig, values).parallel.overlap_update
    with pytest.raises(ConfigError, match=re.escape(hint)):
        build(TrainConfig, {**values, **changes})


