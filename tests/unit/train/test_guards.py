"""Tests of bad-step detection on known values, of the guards' actions, and of optimizers that skip on the device."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.errors import ConfigError
from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.guards import policy
from tidewheel.train.guards.config import GuardsConfig
from tidewheel.train.guards.detect import DEVIATION, LEAST, Detector
from tidewheel.train.guards.policy import Guard
from tidewheel.train.optim.model_optimizer import ModelOptimizer
from tidewheel.train.positions import Positions

CPU = torch.device("cpu")


def judge(guard: Guard | Detector, loss: float, norm: float = 1.0) -> list[float]:
    return guard.judge(torch.tensor(loss, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64)).tolist()


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(1e-3, 1e3)), min_size=1, max_size=40), st.integers(8, 16))
def test_the_deviation_equals_the_standard_librarys(values: list[tuple[float, float]], window: int):
    """The reference uses the standard library's median, for full and partly filled windows."""
    detector = Detector(GuardsConfig(window=window), CPU)
    for index, (loss, norm) in enumerate(values):
        previous = values[max(0, index - window):index]
        _, *deviations, withheld = judge(detector, loss, norm)
        assert not withheld
        for z, now, past, floor in ((deviations[0], loss, [value for value, _ in previous], LEAST),
                                    (deviations[1], math.log(norm), [math.log(value) for _, value in previous], None)):
            if len(past) < window // 2:
                assert math.isnan(z)
                continue
            middle = statistics.median(past)
            spread = DEVIATION * statistics.median(abs(value - middle) for value in past)
            spread = max(spread, LEAST if floor is None else LEAST * abs(middle))
            assert z == pytest.approx((now - middle) / spread, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("loss", "norm", "reason"), [
    (math.nan, 1.0, "non-finite loss"), (math.inf, math.inf, "non-finite loss"), (3.0, math.inf, "non-finite gradient"),
    (3.0, math.nan, "non-finite gradient"), (5.0, 1.0, "loss spike"), (3.0, 30.0, "gradient spike"),
    (5.0, 30.0, "loss spike"), (3.0, 1.0, ""), (1.0, 0.01, "")])
@pytest.mark.parametrize("spike", ["ignore", "skip", "rollback"])
def test_bad_steps_are_detected_and_handled(loss: float, norm: float, reason: str, spike: str):
    guard = Guard(GuardsConfig(window=16, spike=spike, non_finite="rollback"), CPU)
    random = np.random.default_rng(0)
    for _ in range(16):
        assert guard.verdict(judge(guard, random.normal(3, 0.05), random.lognormal(0, 0.2))).action == "apply"
    judged = judge(guard, loss, norm)
    verdict = guard.verdict(judged)
    expected = "apply" if not reason else spike if "spike" in reason else "rollback"
    assert (verdict.reason, verdict.action) == (reason, expected)
    assert bool(judged[3]) == (not verdict.applied), "the device and the host agree"
    assert len(guard.state()["window"][0]) == 16


def test_no_false_alarm_on_a_falling_loss():
    """A typical run: the loss falls steeply, then slowly, with noise; the norm rises and falls."""
    random, guard = np.random.default_rng(1), Guard(GuardsConfig(spike="skip"), CPU)
    for step in range(3000):
        loss = 2.5 + 8 * math.exp(-step / 60) + 1.5 * (1 + step) ** -0.3 + random.normal(0, 0.03)
        norm = (0.3 + 3 * math.exp(-step / 40)) * random.lognormal(0, 0.35)
        assert guard.verdict(judge(guard, loss, norm)).action == "apply", step


def test_the_guard_ignores_overflows_of_the_loss_scale():
    guard = Guard(GuardsConfig(non_finite="stop", max_skips=1), CPU, scaled=True)
    for step in range(5):
        verdict = guard.verdict(judge(guard, 3.0, math.inf))
        assert (verdict.reason, verdict.action) == ("overflow", "skip")
        guard.check(verdict, step, "run")
    assert guard.skipped == 5
    with pytest.raises(ConfigError, match="non-finite loss at step 6"):
        guard.check(guard.verdict(judge(guard, math.nan, math.inf)), 6, "run")


def test_skips_are_limited():
    guard = Guard(GuardsConfig(max_skips=3), CPU)
    for step in range(1, 4):
        guard.check(guard.verdict(judge(guard, math.nan)), step, "run")
    guard.check(guard.verdict(judge(guard, 1.0)), 4, "run")
    assert (guard.skipped, guard.in_a_row) == (3, 0)
    verdicts = [guard.verdict(judge(guard, math.nan)) for _ in range(4)]
    with pytest.raises(ConfigError, match="4 steps in a row without an update up to step 8"):
        guard.check(verdicts[-1], 8, "run")


def test_a_resumed_guard_decides_the_same():
    random = np.random.default_rng(2)
    values = [(random.normal(3, 0.1), random.lognormal()) for _ in range(40)]
    whole, first = Guard(GuardsConfig(window=16), CPU), Guard(GuardsConfig(window=16), CPU)
    for loss, norm in values[:21]:
        judge(first, loss, norm)
    second = Guard(GuardsConfig(window=16), CPU)
    second.load(first.state())
    after = [judge(second, loss, norm) for loss, norm in values[21:]]
    assert [judge(whole, loss, norm) for loss, norm in values][21:] == after


@pytest.mark.parametrize("fused", [False, True])
def test_a_withheld_step_leaves_no_trace(fused: bool):
    """Weights, moments and the count of steps stay as they were; fused AdamW gets the flag on the device."""
    weights = [torch.nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([weight], fused=fused) for weight in weights]
    guarded = ModelOptimizer([("w", weights[0])], optimizers[:1])
    assert guarded.skips_on_device == fused
    for withheld in (0.0, 1.0, 0.0):
        for weight in weights:
            weight.grad = torch.full((5,), math.nan if withheld else 0.5)
        guarded.step(skip=torch.tensor(withheld, dtype=torch.float64))
        if not withheld:
            optimizers[1].step()
    assert torch.equal(*weights)
    states = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    for name in states[0]:
        assert torch.equal(torch.as_tensor(states[0][name]), torch.as_tensor(states[1][name])), name


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(1, 5)), max_size=5))
def test_a_window_holds_the_bad_batch_and_nothing_older_than_the_checkpoint(size: int, rollbacks: list):
    plan = Positions(BatchSizes({"global_sequences": size}, 1))
    for step, back, batches in rollbacks:
        back = min(back, step - 1)
        start, end = policy.window(plan, step, back, batches)
        assert set(plan.of(step).tolist()) <= set(range(start, end)) or plan.of(step)[-1] + 1 == end
        assert start >= plan.end(back)
        plan = plan.passing_over((start, end))
        assert not set(plan.of_steps(range(1, 30)).tolist()) & set(range(start, end))
