"""The simulator beside closed forms that others derived, and beside what is published of real runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.plan.config import TIERS, FailureConfig, GoodputConfig, TierConfig
from tidewheel.plan.recovery import PARTS, Trace, best, daly_goodput, draw, simulate, table, young_daly

MTBF = 7200.0
BLOCKING = TierConfig(detect_seconds=20, restart_seconds=60, load_seconds=40, save_stall_seconds=30)


def goodput(tier: TierConfig, intervals, mtbf: float = MTBF, *, failures: int = 3000, **options) -> np.ndarray:
    """Mean over 16 traces of that many failures each, [intervals]."""
    horizon = failures * mtbf
    trace = draw(mtbf, horizon, 16, np.random.default_rng(5))
    useful, parts = simulate(tier, np.array(intervals, float), trace, horizon, **options)
    whole = useful + sum(parts.values())
    np.testing.assert_allclose(whole, horizon, rtol=1e-9)
    return useful.mean(axis=0) / horizon


@pytest.mark.parametrize("mtbf", [1800.0, MTBF, 100_000.0])
def test_blocking_saves_are_daly_s_closed_form(mtbf: float):
    intervals = [60, 300, 900, 3600]
    expected = [daly_goodput(interval, 30, 120, mtbf) for interval in intervals]
    assert goodput(BLOCKING, intervals, mtbf) == pytest.approx(expected, rel=0.01)


def test_the_best_interval_is_young_s():
    """Goodput is flat around the optimum: what is compared is where it lies, and what Young's formula loses."""
    intervals = np.geomspace(100, 5000, 40)
    result = goodput(BLOCKING, intervals)
    optimum = young_daly(30, MTBF)
    assert optimum == pytest.approx((2 * 30 * MTBF) ** 0.5)
    assert intervals[result.argmax()] == pytest.approx(optimum, rel=0.25)
    assert float(goodput(BLOCKING, [optimum])[0]) > result.max() - 0.001


def one_trace(*gaps: float, chance: float = 0.5) -> Trace:
    times = np.array([[*gaps, 1e9]])
    return Trace(times, np.full(times.shape, chance), np.array([len(gaps)]))


def test_one_failure_by_hand():
    """Saves every 100 s that stall 2 s and count 30 s later; the failure comes after 250 s, the run ends at 600 s."""
    tier = TierConfig(detect_seconds=5, restart_seconds=10, load_seconds=5, save_stall_seconds=2, upload_seconds=30)
    useful, parts = simulate(tier, np.array([100.0]), one_trace(250.0), 600.0)
    # work at 250 s: 250 - 2 stalls = 246; saves at 100 (102 s) and 200 (202-204 s): both count, at 132 and 234 s
    assert {name: float(spent[0, 0]) for name, spent in parts.items()} == pytest.approx({
        "detection": 5, "restart": 15, "redone": 46, "save_stall": 2 * 2 + 3 * 2, "refresh": 0, "checks": 0})
    assert float(useful[0, 0]) == pytest.approx(600 - 20 - 46 - 10)
    # at 220 s the second is still being uploaded: back to the first
    _, parts = simulate(tier, np.array([100.0]), one_trace(220.0), 600.0)
    assert float(parts["redone"][0, 0]) == pytest.approx(116)


def test_a_copy_in_memory_by_hand():
    tier = TierConfig(detect_seconds=1, restart_seconds=1, load_seconds=1, save_stall_seconds=0, refresh_seconds=7,
                      storage_seconds=50)
    _, parts = simulate(tier, np.array([100.0]), one_trace(250.0), 600.0, copy_lost=0.4)
    assert float(parts["redone"][0, 0]) == pytest.approx(250 % 7)
    assert float(parts["restart"][0, 0]) == 2
    _, parts = simulate(tier, np.array([100.0]), one_trace(250.0, chance=0.3), 600.0, copy_lost=0.4)
    assert float(parts["redone"][0, 0]) == pytest.approx(50)
    assert float(parts["restart"][0, 0]) == 50
    # a second failure 2 s after the first, while the run is down: of 2 nodes it may well be the one with the copy
    _, parts = simulate(tier, np.array([100.0]), one_trace(250.0, 2.0), 600.0, copy_lost=0.4, nodes=2)
    assert float(parts["redone"][0, 0]) == pytest.approx(50)


@given(interval=st.floats(10, 1e4), stall=st.floats(0, 50), upload=st.floats(0, 500), seed=st.integers(0, 99),
       refresh=st.just(0) | st.floats(1, 100), cost=st.floats(0, 0.2))
def test_every_second_is_in_one_part(interval, stall, upload, refresh, cost, seed):
    tier = TierConfig(detect_seconds=3, restart_seconds=20, load_seconds=9, save_stall_seconds=stall,
                      upload_seconds=upload, refresh_seconds=refresh, refresh_stall_seconds=cost, storage_seconds=60)
    trace = draw(900.0, 40_000.0, 4, np.random.default_rng(seed))
    useful, parts = simulate(tier, np.array([interval]), trace, 40_000.0, joining=2, copy_lost=0.1, nodes=16)
    assert all((part >= 0).all() for part in parts.values())
    assert set(parts) == set(PARTS)
    np.testing.assert_allclose(useful + sum(parts.values()), 40_000.0, rtol=1e-9)


def test_failure_rates_are_the_published_ones():
    assert FailureConfig(rate="llama3").mtbf_seconds(16_384) == pytest.approx(54 * 86_400 / 419)
    assert FailureConfig(rate="rsc1").mtbf_seconds(16_384) == pytest.approx(1.8 * 3600, rel=0.01)
    assert FailureConfig(rate="rsc1").mtbf_seconds(131_072) == pytest.approx(0.23 * 3600, rel=0.03)
    assert FailureConfig(rate="rsc2").mtbf_seconds(8_000) == pytest.approx(86_400 / 2.34)
    assert FailureConfig(rate="ft_hsdp").mtbf_seconds(8_000) == pytest.approx(86_400 / 2.3)
    assert FailureConfig(rate="rsc1_1024").mtbf_seconds(1_024) == pytest.approx(7.9 * 3600)
    with pytest.raises(ConfigError, match="mixed two measurements: use rsc1"):
        build(GoodputConfig, {"failures": {"rate": "meta"}})
    assert FailureConfig(rate=1e-5).mtbf_seconds(1_000) == pytest.approx(3600 * 100)
    with pytest.raises(ConfigError, match="more than 0"):
        build(GoodputConfig, {"failures": {"rate": 0}})


def test_llama_3_trained_more_than_nine_tenths_of_the_time():
    """Its restarts were automated and took minutes, checkpoints were frequent: arXiv:2407.21783 says over 90 %."""
    minutes = TierConfig(detect_seconds=60, restart_seconds=300, load_seconds=120, save_stall_seconds=5,
                         upload_seconds=60)
    [row] = table(GoodputConfig(gpus=(16_384,), interval_minutes=(10,), tiers={"by hand": minutes},
                                failures=FailureConfig(rate="llama3")))
    assert row.failures == pytest.approx(419, rel=0.05)
    assert 0.90 < row.goodput < 0.96


def test_tiers_keep_their_order_at_every_size():
    often = GoodputConfig(runs=8, failures=FailureConfig(rate="rsc1_1024"))  # rarely, a copy costs what it saves
    rows = table(often)
    assert len(rows) == 5 * 9 * 3
    for gpus in (1_024, 16_384):
        results = {row.tier: row.goodput for row in best(rows) if row.gpus == gpus}
        assert list(results) == list(TIERS)
        assert sorted(results.values(), reverse=True) == list(results.values())
    assert rows == table(often), "the seed decides"


def test_the_command_prints_and_draws(tmp_path, capsys):
    from tidewheel.cli import run_command

    figure = tmp_path / "goodput.svg"
    assert run_command(["plan", "goodput", "--set", "gpus=[64]", "--set", "runs=2", "--plot", str(figure)]) == 0
    printed = capsys.readouterr().out
    assert all(tier in printed for tier in TIERS)
    drawn = figure.read_text()
    assert drawn.startswith("<svg")
    assert "64 GPUs" in drawn
    assert run_command(["plan", "goodput", "--set", "gpu=[64]"]) == 2
