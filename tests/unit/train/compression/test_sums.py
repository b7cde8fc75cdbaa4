"""What each compression sends and leaves behind, with all slots in one process: brute force is the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.compressed import summed
from tidewheel.train import compressions
from tidewheel.train.compression import At, Compression

KINDS = [("topk", {"density": 0.1}), ("randomk", {"density": 0.1}), ("quantised", {}), ("quantised", {"bits": 4}),
         ("one_bit", {"block": 16}), ("power_sgd", {"rank": 2})]


def part_of(kind: str, settings: dict[str, Any]) -> Compression:
    return compressions.KIND.build(kind, {"smallest": 1, **settings})


def gradients(slots: int, rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(slots, rows * columns, generator=generator) * torch.logspace(-3, 1, rows * columns)


@pytest.mark.parametrize(("kind", "settings"), KINDS)
@given(slots=st.integers(1, 5), rows=st.integers(1, 20), columns=st.integers(1, 20), seed=st.integers(0, 99))
def test_what_is_sent_and_what_stays_add_up_to_the_gradients(kind, settings, slots, rows, columns, seed):
    part = part_of(kind, settings)
    if not part.fits((rows, columns)):
        return
    values = gradients(slots, rows, columns, seed)
    total, left, _ = summed(part, values, (rows, columns))
    torch.testing.assert_close(total + left.sum(dim=0), values.sum(dim=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_every_step_sends_something_else_until_all_is_sent(kind, settings):
    part = part_of(kind, settings)
    values = gradients(3, 16, 24, 1)
    once, left, ats = summed(part, values, (16, 24))
    sent, first = once.clone(), (once - values.sum(dim=0)).norm()
    for count in range(1, 60):
        total, left, ats = summed(part, left, (16, 24), count=count, state=[{**at.state, **at.new} for at in ats])
        sent += total
    assert (sent - values.sum(dim=0)).norm() < 0.05 * first


@pytest.mark.parametrize(("kind", "settings"), KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_gives_a_sum_that_is_not(kind, settings, bad):
    for place in (0, 17, 383):
        values = gradients(3, 16, 24, 1)
        values[1, place] = bad
        total, _, _ = summed(part_of(kind, settings), values, (16, 24))
        assert not total.isfinite().all()


@given(slots=st.integers(1, 4), count=st.integers(1, 300), density=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_topk_sends_the_largest_of_each_slot(slots, count, density, seed):
    values = gradients(slots, 1, count, seed)
    total, left, _ = summed(part_of("topk", {"density": density}), values, (count,))
    expected = np.zeros(count, dtype=np.float32)
    for row, rest in zip(values.numpy(), left.numpy()):
        chosen = np.argsort(-np.abs(row))[:int(np.ceil(density * count))]
        expected[chosen] += row[chosen]
        assert not rest[chosen].any()
    np.testing.assert_allclose(total.numpy(), expected, rtol=1e-6)


@given(count=st.integers(1, 500), density=st.floats(0.01, 1.0), step=st.integers(0, 9))
def test_randomk_sends_distinct_elements_whose_number_is_exact(count, density, step):
    total, left, _ = summed(part_of("randomk", {"density": density}), torch.ones(2, count), (count,), count=step)
    assert set(total.tolist()) <= {0.0, 2.0}
    assert (total == 2).sum() == np.ceil(density * count)
    assert torch.equal(left[0], (total == 0).float())


def test_randomk_sends_each_element_equally_often():
    part = part_of("randomk", {"density": 0.13})
    times = sum(summed(part, torch.ones(1, 100), (100,), count=step)[0] for step in range(600))
    assert times.sum() == 13 * 600
    assert times.min() > 0.6 * 78
    assert times.max() < 1.5 * 78


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_right_on_average_and_off_by_less_than_a_step(bits):
    part, levels = part_of("quantised", {"bits": bits, "block": 64}), 2 ** (bits - 1) - 1
    values = gradients(1, 1, 200, 3).sort(dim=1).values
    sums = torch.stack([summed(part, values, (200,), count=step)[0] for step in range(400)])
    most = values.abs().amax() / levels
    assert ((sums - values).abs() <= 2 * most + 1e-6).all()
    error = (sums.mean(dim=0) - values[0]) / most
    assert error.abs().max() < 6 * 0.7 / 20, "the mean of 400 roundings, twice in a row"
    assert error.mean().abs() < 0.02


def test_random_numbers_follow_from_seed_step_slot_and_element_alone(monkeypatch):
    from tidewheel.train.compressions.coding import counter

    def draws(slots: range, **changes: Any) -> torch.Tensor:
        at = At(**{"name": "w", "shape": (40,), "count": 3, "seed": 1, "slots": slots, "all_slots": 8, **changes})
        return counter.uniform(at, "gradients", slots, 40, torch.device("cpu"))

    whole = draws(range(8))
    assert torch.equal(torch.cat([draws(range(2)), draws(range(2, 5)), draws(range(5, 8))]), whole)
    for changes in ({"name": "v"}, {"count": 4}, {"seed": 2}):
        assert not (draws(range(8), **changes) == whole).any()
    assert whole.unique().numel() == whole.numel()
    monkeypatch.setattr(counter, "CHUNK", 7)
    assert torch.equal(draws(range(8)), whole)
    many = counter.uniform(At("w", (1,), 0, 0, range(1), 1), "x", range(4), 50_000, torch.device("cpu"))
    assert (many.min() >= 0, many.max() < 1) == (True, True)
    counts = torch.histc(many, bins=16, min=0, max=1)
    assert (counts / 12_500 - 1).abs().max() < 0.05


def test_signs_are_those_of_the_elements_and_sizes_the_means_of_blocks():
    values = gradients(1, 1, 48, 2)
    total, left, _ = summed(part_of("one_bit", {"block": 16}), values, (48,))
    row = values[0].numpy()
    blocks = [np.where(part >= 0, 1, -1) * np.abs(part).mean() for part in np.split(row, 3)]
    np.testing.assert_allclose(total, np.concatenate(blocks), rtol=1e-5)  # coded again, it stays what it is
    np.testing.assert_allclose(left[0], row - np.concatenate(blocks), rtol=1e-4, atol=1e-6)


def test_low_rank_sums_are_exact_when_the_sum_has_that_rank():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(3, 20, 2, generator=generator), torch.randn(2, 30, generator=generator)
    values = (left @ right).flatten(1)
    total, _, _ = summed(part_of("power_sgd", {"rank": 2}), values, (20, 30))
    torch.testing.assert_close(total, values.sum(dim=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "settings", "share"), [
    ("topk", {"density": 0.01}, 0.0201), ("randomk", {"density": 0.01}, 0.0101), ("quantised", {}, 0.26),
    ("quantised", {"bits": 4}, 0.13), ("one_bit", {}, 0.036), ("power_sgd", {"rank": 4}, 0.032)])
def test_bytes_shrink_as_much_as_the_method_promises(kind, settings, share):
    sent = part_of(kind, settings).sent_bytes((256, 256), 2)
    assert sent / (4 * 256 * 256) <= share


@pytest.mark.parametrize(("kind", "settings"), [
    ("topk", {"density": 0.05}), ("randomk", {"density": 0.05}), ("power_sgd", {"rank": 1})])
def test_descent_comes_nearer_to_the_optimum_with_error_feedback(kind, settings):
    """Four workers minimise |w - target|^2, each with its target: gradients cancel at the optimum, and are not 0."""
    part, shape = part_of(kind, settings), (16, 32)
    targets = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) + torch.linspace(-2, 2, 4)[:, None]
    optimum = targets.mean(dim=0)

    def distance(feedback: bool) -> float:
        value, left, state = torch.zeros(512), torch.zeros(4, 512), None
        for count in range(200):
            total, left, ats = summed(part, value - targets + left * feedback, shape, count=count, state=state)
            state = [{**at.state, **at.new} for at in ats]
            value = value - 0.02 * total / 4
        return float((value - optimum).norm() / optimum.norm())

    nearer = distance(True)
    assert nearer < 0.3
    assert nearer < 0.5 * distance(False)


def test_signs_alone_go_the_wrong_way_and_with_error_feedback_the_right_one():
    """A gradient that is 4 in one step of four and else -1 is 1/4 on average (arXiv:1901.09847, section 3)."""
    part, steps = part_of("one_bit", {"block": 16}), 200
    sums = {}
    for feedback in (True, False):
        left, sent = torch.zeros(1, 64), torch.zeros(64)
        for step in range(steps):
            gradient = torch.where((torch.arange(64) + step) % 4 == 0, 4.0, -1.0)
            total, left, _ = summed(part, gradient + left * feedback, (64,), count=step)
            sent += total / steps
        sums[feedback] = sent
    assert (sums[True] - 0.25).abs().max() < 0.1
    assert sums[False].max() < -0.5
