"""Spares beside scipy's binomial, rates of real runs, measured times, and what mechanisms contribute."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.report.test_explain import A, B, Recorded
from tidewheel.cli import run_command
from tidewheel.errors import ConfigError, StorageError
from tidewheel.plan import spares
from tidewheel.plan.config import TIERS, FailureConfig, GoodputConfig
from tidewheel.plan.measured import applied, storms
from tidewheel.plan.mechanisms import MECHANISMS, effective_times
from tidewheel.storage import store


@pytest.fixture(scope="module")
def binom() -> Any:
    """Return scipy's binomial distribution."""
    return pytest.importorskip("scipy.stats").binom


@given(count=st.integers(1, 20_000), chance=st.floats(1e-6, 0.999), quantile=st.sampled_from((0.5, 0.9, 0.99, 0.999)))
def test_the_quantile_is_scipy_s(binom: Any, count: int, chance: float, quantile: float) -> None:
    ours = spares.binomial_quantile(count, chance, quantile)
    # at an exact step of the distribution, rounding may decide
    assert binom.cdf(ours, count, chance) >= quantile - 1e-9
    assert ours == 0 or binom.cdf(ours - 1, count, chance) < quantile + 1e-9
    assert abs(ours - binom.ppf(quantile, count, chance)) <= 1


def test_the_ends_of_the_quantile(binom: Any) -> None:
    assert spares.binomial_quantile(10, 0.0, 0.99) == 0
    assert spares.binomial_quantile(10, 1.0, 0.99) == 10
    assert spares.spare_nodes(1024, 6.5 / 24_000, 24.0) == binom.ppf(0.99, 1024, 1 - math.exp(-0.0065))


def test_a_published_rate_is_per_node() -> None:
    assert spares.published_rate(FailureConfig(rate="rsc2"), 77) == pytest.approx(2.34 / 24_000)


def test_the_rate_of_real_runs_counts_failures_of_nodes_only(tmp_path: Path, capsys: Any) -> None:
    run = Recorded(tmp_path / "night")
    run.begin().fail(13, "no sign of life for 3 s").event(16, "resume", step=10, world_size=1, generation=1, redo=0)
    run.train(16, range(11, 31), 1, A).event(40, "node_draining", node=B)
    run.event(41, "guard", step=30, reason="loss spike", action="skip").told()
    rate = spares.measured_rate([run.store.uri])
    # by hand: two nodes for 13 s, one for 23 s
    assert (rate.failures, rate.node_hours * 3600) == (1, pytest.approx(2 * 13 + 23))
    assert rate.per_node_hour == pytest.approx(3600 / 49)
    assert spares.MeasuredRate(0, 100.0).per_node_hour == pytest.approx(0.00693, rel=1e-3)
    assert run_command(["plan", "spares", "--nodes", "4", "--run", run.store.uri, "--replace-hours", "0.01",
                        "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["nodes"], row["per_1000_node_days"]) == (4, pytest.approx(24_000 * 3600 / 49, rel=1e-4))


def test_the_command_prints_a_row_for_each_size(capsys: Any) -> None:
    assert run_command(["plan", "spares", "--nodes", "128", "1024", "--rate", "llama3"]) == 0
    assert "1,024" in capsys.readouterr().out
    assert run_command(["plan", "spares", "--nodes", "128", "--rate", "meta"]) == 2
    assert "use rsc1" in " ".join(capsys.readouterr().err.split())
    assert run_command(["plan", "spares", "--nodes", "128", "--quantile", "1"]) == 2


def test_measured_times_replace_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "control.json").write_text(json.dumps({"kind": "control_plane", "agreements": [
        {"workers": 64, "deaths": 1, "seconds": 0.01}, {"workers": 1000, "deaths": 1, "seconds": 0.113},
        {"workers": 1000, "deaths": 10, "seconds": 1.1}]}))
    (tmp_path / "elastic.json").write_text(json.dumps({"kind": "elastic", "seconds": {"worker": 0.3, "frozen": 3.2}}))
    config = applied(GoodputConfig(), [str(tmp_path / "control.json"), str(tmp_path / "elastic.json")])
    assert config.seconds_per_1000_ranks == pytest.approx(0.113)
    tier = config.tiers["in place, memory tier"]
    assert (tier.detect_seconds, tier.restart_seconds, tier.load_seconds) == (pytest.approx(2.9), 0.3, 0.0)
    assert config.tiers["plain Ray Train"] == TIERS["plain Ray Train"]


def test_one_file_holds_what_several_benchmarks_measured(tmp_path: Path) -> None:
    storm = {"kill_seconds": 60.0, "ranks": 290, "workers": 300, "step_seconds": 9.0, "load_seconds": 1.0,
             "rejoined_seconds": 0.05, "effective": 0.862}
    (tmp_path / "measured.json").write_text(json.dumps({"kind": "measurements", "machine": "this one", "parts": [
        {"kind": "control_plane", "agreements": [{"workers": 1000, "deaths": 1, "seconds": 0.2}]},
        {"kind": "elastic", "seconds": {"worker": 0.3, "plain": 8.2}},
        {"kind": "memory_tier", "keep_seconds": 0.004, "save_seconds": 0.03},
        {"kind": "silent_corruption", "check_share": 0.011}, {"kind": "storm", "storms": [storm]}]}))
    config = applied(GoodputConfig(), [str(tmp_path / "measured.json")])
    tier = config.tiers["in place, memory tier"]
    assert config.seconds_per_1000_ranks == pytest.approx(0.2)
    assert (tier.restart_seconds, tier.new_processes_seconds) == (0.3, 8.2)
    assert (tier.refresh_stall_seconds, tier.save_stall_seconds, tier.check_share) == (0.004, 0.03, 0.011)
    [row] = storms([str(tmp_path / "measured.json")])
    assert row.model_dump() == storm
    small = config.model_copy(update={"gpus": (1_024,), "days": 6.0, "runs": 2, "interval_minutes": (10.0,)})
    [item] = effective_times(small)
    assert item.without["checks for silent corruption"] == pytest.approx(item.whole * 1.011, rel=1e-3)


@pytest.mark.parametrize(("content", "says"), [
    (None, "there is no such file"), ("{}", "no measurement"), ('{"kind": "elastic"}', "seconds"),
    ('{"kind": "elastic", "seconds": {}, "more": 1}', "more"),
    ('{"kind": "elastic", "seconds": {"worker": -1}}', "worker")])
def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        applied(GoodputConfig(), [str(path)])


def test_storage_that_does_not_answer_is_no_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Any, key: str) -> bytes:
        raise StorageError("access denied", where=key, fix="give credentials")

    monkeypatch.setattr(type(store(tmp_path)), "read", read)
    with pytest.raises(ConfigError, match="cannot be read: access denied") as raised:
        applied(GoodputConfig(), [str(tmp_path / "file.json")])
    assert raised.value.fix == "give credentials"


def test_each_mechanism_contributes_and_all_together_most(capsys: Any) -> None:
    config = GoodputConfig(gpus=(1_024, 131_072), days=6, runs=4, interval_minutes=(2, 10, 60))
    small, large = effective_times(config)
    for item in (small, large):
        assert item.without.keys() == {mechanism.name for mechanism in MECHANISMS}
        assert all(item.none <= share <= item.whole + 1e-9 for share in item.without.values())
    assert large.whole < small.whole
    assert large.without["automatic restart"] < 0.5
    assert run_command(["plan", "goodput", "--mechanisms", "--set", "gpus=[1024]", "--set", "runs=2"]) == 0
    assert "without memory tier" in " ".join(capsys.readouterr().out.split())
