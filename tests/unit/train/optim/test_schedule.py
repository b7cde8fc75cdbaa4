"""Tests of schedules: ends, bounds and forms, in steps and in tokens."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.errors import ConfigError
from tidewheel.train.optim.schedule import Schedule
from tidewheel.train.schedules import WSD, Constant, Cosine, Linear, Piecewise

warmups, ends = st.integers(0, 300), st.floats(0, 1)
schedules = st.one_of(
    st.builds(Constant, warmup_steps=warmups), st.builds(Cosine, warmup_steps=warmups, final_fraction=ends),
    st.builds(Linear, warmup_steps=warmups, final_fraction=ends),
    st.builds(WSD, warmup_steps=warmups, final_fraction=ends, decay_fraction=st.floats(0.01, 1),
              decay_form=st.sampled_from(["linear", "1-sqrt", "cosine"])))


def rates(steps: int, config: Schedule, peak: float = 2.0) -> list[float]:
    return [config.learning_rate(step, steps, peak) for step in range(1, steps + 1)]


@given(schedules, st.integers(1, 400))
def test_the_learning_rate_rises_to_the_peak_and_falls_to_the_end(config: Schedule, steps: int):
    found, warmup = rates(steps, config), min(config.warmup_steps, steps // 2)
    assert found[:warmup] == sorted(found[:warmup])
    assert found[max(0, warmup - 1):] == sorted(found[max(0, warmup - 1):], reverse=True)
    assert all(0 <= rate <= 2.0 * (1 + 1e-12) for rate in found)
    if warmup:
        assert found[warmup - 1] == 2.0
        assert found[0] == pytest.approx(2.0 / warmup)
    if not isinstance(config, Constant):
        assert found[-1] == pytest.approx(2.0 * config.final_fraction, abs=1e-12)
    else:
        assert set(found[warmup:]) <= {2.0}


@given(schedules, st.integers(10, 200), st.integers(1, 5000))
def test_progress_in_tokens_gives_the_rates_of_progress_in_steps(config: Schedule, steps: int, size: int):
    """With batches of one size, steps and tokens give the same rates."""
    tokens = config.model_copy(update={"unit": "tokens", "warmup_tokens": config.warmup_steps * size})
    if config.warmup_steps > steps // 2:
        return  # half of an odd number of steps is rounded
    for step in range(1, steps + 1):
        assert tokens.learning_rate(step * size, steps * size, 2.0) == pytest.approx(
            config.learning_rate(step, steps, 2.0), rel=1e-9, abs=1e-12)


@given(st.integers(20, 500), st.floats(0, 0.9))
def test_a_linear_decay_can_be_inverted(steps: int, final: float):
    config = Linear(warmup_steps=5, final_fraction=final)
    for step in range(6, steps + 1):
        share = (1.0 - config.learning_rate(step, steps, 1.0)) / (1.0 - final)
        assert 5 + share * (steps - 5) == pytest.approx(step, abs=1e-6)


def test_each_form_has_the_known_values():
    cosine = rates(100, Cosine(warmup_steps=10, final_fraction=0.1))
    assert cosine[54] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5)), "half-way down"
    wsd = WSD(warmup_steps=10, final_fraction=0.0, decay_fraction=0.2)
    stable = rates(100, wsd)
    assert set(stable[9:80]) == {2.0}, "at the peak until the last fifth"
    assert stable[84] == pytest.approx(2.0 * (1 - 0.25**0.5)), "a quarter into the decay"
    linear = rates(100, wsd.model_copy(update={"decay_form": "linear"}))
    assert linear[84] == pytest.approx(2.0 * 0.75)
    cosine = rates(100, wsd.model_copy(update={"decay_form": "cosine"}))
    assert cosine[84] == pytest.approx(2.0 * (0.5 + 0.5 * math.cos(math.pi / 4)))
    exponential = rates(100, WSD(warmup_steps=10, final_fraction=0.1, decay_form="exponential"))
    assert exponential[79:] == pytest.approx([2.0 * 0.1 ** (step / 20) for step in range(21)]), "one factor a step"
    assert max(rates(4, Cosine(warmup_steps=10))) == 2.0, "a run shorter than its warm-up reaches its peak"


@given(st.integers(20, 400), st.integers(1, 40))
def test_warm_up_and_decay_as_shares_are_those_of_their_steps(steps: int, percent: int):
    share, length = percent / 100, round(percent / 100 * steps)
    assert rates(steps, Cosine(warmup_fraction=share)) == rates(steps, Cosine(warmup_steps=length))
    decayed = rates(steps, WSD(warmup_steps=0, decay_steps=length or 1))
    assert decayed == pytest.approx(rates(steps, WSD(warmup_steps=0, decay_fraction=(length or 1) / steps)))
    tokens = WSD(unit="tokens", warmup_steps=0, decay_tokens=(length or 1) * 64)
    assert decayed == [tokens.learning_rate(step * 64, steps * 64, 2.0) for step in range(1, steps + 1)]


def test_pieces_follow_each_other():
    """As DeepSeek-V3's: constant, a cosine, constant, and a lower constant (arXiv:2412.19437, section 4.2)."""
    found = rates(200, Piecewise(warmup_steps=10, pieces=[
        {"until": 100}, {"until": 140, "form": "cosine", "final_fraction": 0.1}, {"until": 180, "final_fraction": 0.1},
        {"until": 190, "final_fraction": 0.05}]))
    assert set(found[9:100]) == {2.0}
    assert found[119] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5)), "half-way down"
    assert found[139:180] == pytest.approx([0.2] * 41)
    assert found[180:] == pytest.approx([0.1] * 20), "the last piece goes on to the end"


@given(warmups, ends, st.integers(20, 400))
def test_a_single_piece_is_the_form_itself(warmup: int, final: float, steps: int):
    for form, plain in (("cosine", Cosine), ("linear", Linear)):
        piece = {"until": steps, "form": form, "final_fraction": final}
        assert rates(steps, Piecewise(warmup_steps=warmup, pieces=[piece])) == pytest.approx(
            rates(steps, plain(warmup_steps=warmup, final_fraction=final)))


def test_a_piece_may_end_before_its_form_does():
    """As OLMo 2's: a cosine over 500 steps that ends at 400."""
    piece = {"until": 400, "form": "cosine", "final_fraction": 0.1, "decay_until": 500}
    short = rates(400, Piecewise(warmup_steps=10, pieces=[piece]))
    assert short == pytest.approx(rates(500, Cosine(warmup_steps=10, final_fraction=0.1))[:400])


@pytest.mark.parametrize(("pieces", "message"), [
    ([], "no pieces"), ([{"until": 50}, {"until": 50}], "one after the other"),
    ([{"until": 20}, {"until": 50}], "within the warm-up"), ([{"until": 50, "decay_until": 40}], "at least 50")])
def test_pieces_that_make_no_schedule_are_refused(pieces: list[dict], message: str):
    with pytest.raises(ConfigError, match=message):
        Piecewise(warmup_steps=20, pieces=pieces)


def test_a_warm_up_in_the_other_unit_is_refused():
    with pytest.raises(ConfigError, match="unit is tokens: give warmup_tokens"):
        Cosine(unit="tokens", warmup_steps=10)
    with pytest.raises(ConfigError, match="warmup_tokens is given, but unit is steps"):
        Cosine(warmup_tokens=10)
    assert Cosine(unit="tokens", warmup_tokens=10).warmup == 10
