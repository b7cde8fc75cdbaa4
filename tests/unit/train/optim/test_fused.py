"""Tests of fused updates: the gradients' factor and whether to update are read on the device, in the update itself.

They are what CUDA gets. Here they run on CPU and are compared with the plain updates, and on a device without values,
where the waits of the host and the passes over memory are counted.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.benchmarks import host_syncs
from tests.device_counters import DEVICE, device_that_counts
from tests.unit.train.optim.test_optimizers import KINDS, SHAPES, Weights, made
from tidewheel.train import optimizers
from tidewheel.train.collectives import Collectives
from tidewheel.train.guards.config import GuardsConfig
from tidewheel.train.guards.policy import Guard
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.optim.model_optimizer import ModelOptimizer, is_fused
from tidewheel.train.optimizers.rules import adamw8bit, on_device
from tidewheel.train.runtime import Runtime

FACTOR = 0.25


def fuse(patch: pytest.MonkeyPatch, on: bool = True) -> None:
    """Have every built-in optimizer choose its fused form, or its plain one, whatever the device."""
    for kind in KINDS:
        patch.setattr(sys.modules[optimizers.KIND.find(kind).__module__], "on_cuda", lambda groups: on)


def update(weights: Weights, optimizer: ModelOptimizer, step: int, factor: float = 1.0, rate: float = 1e-2) -> None:
    """Make one update with gradients that are divided by `factor` and multiplied by it again."""
    for name, gradient in weights.gradients(step).items():
        weights.held[name].grad = gradient / factor
    optimizer.set_learning_rate(rate)
    optimizer.step(skip=torch.zeros((), dtype=torch.float64), factor=torch.tensor(factor, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_update_equals_the_plain_one(kind: str, monkeypatch: pytest.MonkeyPatch):
    plain, optimizer = made(kind)
    fuse(monkeypatch)
    fused, other = made(kind)
    assert other.skips_on_device
    assert not optimizer.skips_on_device
    for step in range(5):
        update(plain, optimizer, step)
        update(fused, other, step, FACTOR)
    for name, expected in plain.held.items():
        torch.testing.assert_close(fused.held[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    mine, theirs = (training_state(*pair)["optimizer"] for pair in ((fused, other), (plain, optimizer)))
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        one_code = 1.0 if expected.dtype == torch.uint8 else 1e-6
        torch.testing.assert_close(mine[name].float(), expected.float(), rtol=1e-4, atol=one_code, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient", [math.nan, math.inf, 1.0])
def test_a_withheld_fused_update_changes_no_bit(kind: str, gradient: float, monkeypatch: pytest.MonkeyPatch):
    fuse(monkeypatch)
    weights, optimizer = made(kind)
    update(weights, optimizer, 0)
    before = {name: tensor.clone() for group in training_state(weights, optimizer).values()
              for name, tensor in group.items()}
    for parameter in weights.held.values():
        parameter.grad = torch.full_like(parameter, gradient)
    factor = torch.tensor(gradient, dtype=torch.float64)
    optimizer.step(skip=torch.ones((), dtype=torch.float64), factor=factor)
    after = {name: tensor for group in training_state(weights, optimizer).values() for name, tensor in group.items()}
    for name, expected in before.items():
        assert torch.equal(after[name], expected), name
    update(weights, optimizer, 1)
    assert not any(torch.equal(weights.held[name], before[name]) for name in SHAPES)


@pytest.mark.parametrize("fused", [True, False])
def test_paged_moments_stay_in_host_memory_and_change_no_bit(fused: bool, monkeypatch: pytest.MonkeyPatch):
    """The fused update works on copies, as on a GPU: none of the kept moments reaches it."""
    fuse(monkeypatch, fused)
    plain, optimizer = made("adamw8bit")
    paged, other = made("adamw8bit", paged=True)
    kept = {name: (state, state.data_ptr()) for name, state in training_state(paged, other)["optimizer"].items()}
    seen: set[int] = set()
    for kernel in ("_update", "_update_quantised"):
        inner = getattr(adamw8bit, kernel)

        def watched(*arguments: Any, inner: Any = inner) -> None:
            seen.update(part.data_ptr() for part in arguments if isinstance(part, torch.Tensor) and part.ndim > 1)
            inner(*arguments)

        monkeypatch.setattr(adamw8bit, kernel, watched)
    for step in range(4):
        paged.take(other, range(step, step + 1))
    assert bool(seen) is fused
    matrices = {name: place for name, place in kept.items() if place[0].ndim > 1}
    assert not seen & {pointer for _, pointer in matrices.values()}
    plain.take(optimizer, range(4))
    for name, expected in plain.held.items():
        assert torch.equal(paged.held[name], expected), name
    expected_state = training_state(plain, optimizer)["optimizer"]
    for name, (state, pointer) in kept.items():
        assert (state.device.type, state.data_ptr()) == ("cpu", pointer), name
        assert torch.equal(state, expected_state[name]), name


def test_an_optimizer_that_is_not_fused_beside_one_that_is():
    """The plain one has its gradients multiplied before, the fused one has not; neither updates if one must not."""
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    parts = [torch.optim.SGD([first], lr=1.0, fused=True), torch.optim.SGD([second], lr=1.0)]
    assert [is_fused(part) for part in parts] == [True, False]
    optimizer = ModelOptimizer([("a", first), ("b", second)], parts)
    for skip in (1.0, 0.0):
        first.grad, second.grad = torch.full((3,), 2.0), torch.full((3,), 2.0)
        optimizer.step(skip=torch.tensor(skip), factor=torch.tensor(FACTOR, dtype=torch.float64))
        expected = torch.ones(3) if skip else torch.full((3,), 0.5)
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("adam", "adamw")])  # torch's own kernels
def test_a_fused_update_compiles_once(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Each kernel compiles without a break and gives the same update; a new learning rate does not compile it again."""
    fuse(monkeypatch)
    plain, optimizer = made(kind)
    compiled, other = made(kind)
    counter = CompileCounterWithBackend("aot_eager")

    @functools.cache
    def compile_it(function, dynamic: bool):
        return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)

    for step in range(3):
        update(plain, optimizer, step, FACTOR, rate=1e-2 / (1 + step))
    monkeypatch.setattr(on_device, "_compiles", lambda device: True)
    monkeypatch.setattr(on_device, "_compiled", compile_it)
    update(compiled, other, 0, FACTOR, rate=1e-2)
    compilations = counter.frame_count
    assert compilations
    for step in (1, 2):
        update(compiled, other, step, FACTOR, rate=1e-2 / (1 + step))
    assert counter.frame_count == compilations
    for name, expected in plain.held.items():
        torch.testing.assert_close(compiled.held[name], expected, rtol=1e-6, atol=1e-7, msg=name)


class OnDevice(Weights):
    """Parameters and gradients on the device that counts."""

    def __post_init__(self) -> None:
        self.held = {name: nn.Parameter(torch.empty(shape, device=DEVICE)) for name, shape in SHAPES.items()}
        for parameter in self.held.values():
            parameter.grad = torch.empty_like(parameter)


def scalar() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_does_not_wait_in_an_update(kind: str, monkeypatch: pytest.MonkeyPatch):
    """It holds for every built-in optimizer on CUDA. An update reads the gradients, and makes no pass before it."""
    fuse(monkeypatch)
    with device_that_counts() as counters:
        weights = OnDevice()
        optimizer = build_optimizer(weights, optimizers.KIND.build(kind))
        optimizer.set_learning_rate(1e-2)
        gradients = [parameter.grad for parameter in weights.held.values()]
        with counters:
            optimizer.step(skip=scalar(), factor=scalar())
        assert counters.syncs == []
        assert not any("foreach_mul" in kernel.name for kernel in counters.kernels)
        read, written = counters.passes(gradients)
        # AdamW's kernel stores what it has divided; Adafactor squares the gradients first
        limits = {"adafactor": (2, 0), "adamw": (1, 1)}
        assert (read, written) <= limits.get(kind, (1, 1))
        assert read >= 1, "otherwise nothing was counted"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_nothing_but_its_result(kind: str):
    """From the backward pass on, the gradients are read for their norm and in the update."""
    counted = host_syncs.count("debug", kind, "fused")
    assert counted.syncs == 0
    assert 2 <= counted.gradient_reads <= (3 if kind == "adafactor" else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_updates_make_the_host_wait(kind: str, monkeypatch: pytest.MonkeyPatch):
    """The counters notice what the fused updates avoid."""
    fuse(monkeypatch, on=False)
    with device_that_counts() as counters:
        weights = OnDevice()
        optimizer = build_optimizer(weights, optimizers.KIND.build(kind))
        gradients = [parameter.grad for parameter in weights.held.values()]
        with counters:
            optimizer.step(skip=scalar(), factor=scalar())
        assert len(counters.syncs) >= (1 + 2 * len(SHAPES) if kind == "adafactor" else 1)
        read, written = counters.passes(gradients)
        assert read >= 2
        assert written >= 1


def test_the_host_does_not_wait_for_a_guards_judgement():
    with device_that_counts() as counters:
        guard = Guard(GuardsConfig(spike="skip"), DEVICE)
        collectives = Collectives(Runtime(device=DEVICE))
        with counters:
            guard.judge(scalar(), scalar())
            collectives.to_device(torch.zeros(3))
        assert counters.syncs == []
        with counters:
            collectives.to_host(scalar())
            torch.zeros(3).to(DEVICE)
        assert len(counters.syncs) == 2
