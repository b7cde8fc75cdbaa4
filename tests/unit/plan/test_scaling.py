"""Scaling laws: the published tables, recovery of known coefficients, coverage of the intervals, the command."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import scipy.optimize
import scipy.special
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.cli import run_command
from tidewheel.errors import ConfigError
from tidewheel.plan.scaling import budget, rates
from tidewheel.plan.scaling.fit import DELTA, Fit, Observation, fit
from tidewheel.plan.scaling.laws import LAWS, Law
from tidewheel.plan.scaling.report import as_json, page

TRUE = LAWS["besiroglu"]
assert isinstance(TRUE, Law)


def runs(seed: int, noise: float) -> list[Observation]:
    """42 runs on the range of Chinchilla's, with losses of a known law and log-normal noise."""
    generator = np.random.default_rng(seed)
    made = []
    for size in np.geomspace(5e7, 8e9, 6):
        for ratio in np.geomspace(4, 100, 7):
            loss = TRUE.loss(size, ratio * size) * math.exp(noise * generator.standard_normal())
            made.append(Observation(size, ratio * size, loss))
    return made


@pytest.mark.parametrize(("law", "size", "flops", "tokens", "within"), [
    ("chinchilla1", 67e9, 5.76e23, 1.5e12, 0.07), ("chinchilla1", 1e9, 1.21e20, 20.2e9, 0.12),
    ("chinchilla2", 67e9, 6.88e23, 1.7e12, 0.04), ("chinchilla2", 1e9, 1.20e20, 20.0e9, 0.03),
    ("chinchilla3", 67e9, 1.71e24, 4.1e12, 0.05), ("chinchilla3", 1e9, 1.62e20, 27.1e9, 0.05),
    ("chinchilla3", 175e9, 1.26e25, 12.0e12, 0.07)])
def test_published_optima(law: str, size: float, flops: float, tokens: float, within: float):
    """Tables 3 and A3 of arXiv:2203.15556."""
    best = LAWS[law].optimum(flops)
    assert best.parameters == pytest.approx(size, rel=within)
    assert best.tokens == pytest.approx(tokens, rel=within)


def test_the_corrected_fit_agrees_with_the_other_approaches():
    """20 tokens per parameter at Chinchilla's budget, exponent 0.513 (arXiv:2404.10102, section 3)."""
    assert TRUE.exponent == pytest.approx(0.5126, abs=1e-4)
    best = TRUE.optimum(5.76e23)
    assert best.tokens / best.parameters == pytest.approx(20, rel=0.15)


@given(flops=st.floats(1e17, 1e27), factor=st.floats(0.2, 5))
def test_the_optimum_is_the_best_size(flops: float, factor: float):
    best = TRUE.optimum(flops)
    assert 6 * best.parameters * best.tokens == pytest.approx(flops)
    other = best.parameters * factor
    assert best.loss is not None
    assert best.loss <= TRUE.loss(other, flops / 6 / other) + 1e-12


def test_rates_by_hand():
    step, deepseek, kaplan = rates.rates(1e9, 100e9, 2.5, None)[:3]
    assert (step.learning_rate, step.batch_tokens) == pytest.approx((0.0016325, 1.1077e6), rel=1e-3)
    # DeepSeek LLM's figure for 7B on 2T tokens is 4.2e-4 and 2304 sequences of 4,096 (table 2)
    seven = rates.deepseek(6.9e9, 2e12)
    assert seven.learning_rate == pytest.approx(4.2e-4, rel=0.1)
    assert seven.batch_tokens == pytest.approx(2304 * 4096, rel=0.1)
    assert deepseek.learning_rate == pytest.approx(0.3118 * 6e20**-0.125)
    assert kaplan.learning_rate == pytest.approx(0.000348, rel=1e-2)


def test_rates_are_scaled_from_the_nearest_published_run():
    root, linear = rates.scaled(7e9, 16e6)
    assert root.learning_rate == pytest.approx(6.0e-4)
    assert linear.learning_rate == pytest.approx(12.0e-4)
    assert "LLaMA-2 7B" in root.source


def test_known_coefficients_are_recovered():
    found = fit(runs(0, 0.0), resamples=100).law
    assert (found.e, found.a, found.b, found.alpha, found.beta) == pytest.approx(
        (TRUE.e, TRUE.a, TRUE.b, TRUE.alpha, TRUE.beta), rel=1e-5)


def test_no_other_minimiser_finds_a_smaller_loss():
    data = runs(3, 0.01)
    sizes, tokens, losses = (np.log([getattr(run, name) for run in data]) for name in ("parameters", "tokens", "loss"))

    def cost(row: np.ndarray) -> float:
        terms = [row[1] - row[3] * sizes, row[2] - row[4] * tokens, np.full(len(data), row[0])]
        return float(scipy.special.huber(DELTA, scipy.special.logsumexp(terms, axis=0) - losses).sum())

    law = fit(data, resamples=100).law
    ours = np.array([math.log(law.e), math.log(law.a), math.log(law.b), law.alpha, law.beta])
    starts = [ours, *(np.array([e, a, b, 0.5, 0.5]) for e in (0.0, 1.0) for a in (5.0, 10.0) for b in (5.0, 10.0))]
    theirs = min(scipy.optimize.minimize(cost, start, method="Nelder-Mead", options={"maxiter": 600}).fun
                 for start in starts)
    assert cost(ours) <= theirs * (1 + 1e-3)


def test_intervals_cover_the_true_values():
    """Of 20 sets of runs, the 90 % intervals contain the true value about 18 times."""
    covered = dict.fromkeys(("alpha", "beta", "exponent", "e"), 0)
    for seed in range(20):
        found = fit(runs(100 + seed, 0.005), resamples=100, seed=seed)
        for name in covered:
            interval = found.interval(lambda law, name=name: getattr(law, name))  # type: ignore[misc]
            covered[name] += interval.low <= getattr(TRUE, name) <= interval.high
    assert all(count >= 16 for count in covered.values()), covered
    assert sum(covered.values()) < 80, "intervals so wide that they always contain it say nothing"


@pytest.mark.parametrize(("data", "message"), [
    (runs(0, 0)[:5], "cannot determine"), (runs(0, 0)[:7], "1 sizes"),
    ([*runs(0, 0), Observation(1e9, 1e9, -1.0)], "not positive")])
def test_runs_that_determine_nothing_are_refused(data: list[Observation], message: str):
    with pytest.raises(ConfigError, match=message):
        fit(data)


def test_losses_that_do_not_fall_are_refused():
    """Losses that grow with the size, as with one learning rate for all sizes."""
    data = [Observation(run.parameters, run.tokens, TRUE.loss(1e12, run.tokens) * (run.parameters / 5e7) ** 0.02)
            for run in runs(0, 0)]
    with pytest.raises(ConfigError, match="do not fall with the number of parameters"):
        fit(data)


def test_few_noisy_runs_give_wide_intervals_not_errors():
    data = [run for index, run in enumerate(runs(5, 0.03)) if index % 4 == 0]
    found = fit(data, resamples=200)
    values = as_json(found, data, ["run"] * len(data))
    assert all(low <= high for _, low, high in values["intervals"].values())
    value, low, high = values["budgets"][-1]["parameters"]
    assert low < value / 3
    assert high > value * 3


@pytest.fixture(scope="module")
def fitted() -> tuple[Fit, list[Observation]]:
    data = runs(1, 0.005)
    return fit(data, name="mine", resamples=200), data


def test_a_report_has_every_run_and_every_size(fitted: tuple[Fit, list[Observation]]):
    found, data = fitted
    html = page(as_json(found, data, [f"run-{index}" for index in range(len(data))])).decode()
    assert html.count("<circle") == len(data)
    assert html.count("<polyline") == 6
    assert all(f"run-{index}" in html for index in range(len(data)))
    marks = re.findall(r'<text[^>]*text-anchor="middle">([^<]*)</text>', html)
    assert marks == ["1 B", "10 B", "100 B", "training tokens"], "round numbers, however many runs there are"


def test_a_budget_by_a_law_of_ones_own(fitted: tuple[Fit, list[Observation]], tmp_path,
                                       capsys: pytest.CaptureFixture[str]):
    found, data = fitted
    file = tmp_path / "law.json"
    file.write_text(json.dumps(as_json(found, data, ["run"] * len(data))))
    largest = max(6 * run.parameters * run.tokens for run in data)
    assert run_command(["plan", "budget", "--flops", str(100 * largest), "--law", str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["chosen"]["law"] == "mine"
    assert result["chosen"]["optimum"]["parameters"] == pytest.approx(found.law.optimum(100 * largest).parameters)
    assert "the budget is 100 times that" in " ".join(result["notes"])


def test_the_command(capsys: pytest.CaptureFixture[str]):
    assert run_command(["plan", "budget", "--gpus", "64", "--gpu", "h100", "--days", "7", "--mfu", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert "64 x h100 for 7 days at 50 % MFU" in shown
    assert all(name in shown for name in (*LAWS, "step_law", "deepseek", "kaplan", "square_root", "linear"))
    assert run_command(["plan", "budget", "--flops", "1e21", "--parameters", "1e9", "--batch-tokens", "1e6",
                        "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["chosen"]["optimum"]["tokens"] == pytest.approx(1e21 / 6e9)
    assert {rate["batch_tokens"] for rate in result["rates"][3:]} == {1e6}


def test_every_row_has_a_source():
    item = budget.budget(1e21, "--flops")
    assert all("arXiv:" in row.source for row in (*item.suggestions, *item.rates))


@pytest.mark.parametrize(("options", "told"), [
    ([], "either FLOPs, or GPUs and days"), (["--flops", "1e21", "--gpus", "8", "--days", "1"], "either FLOPs"),
    (["--gpus", "8"], "either FLOPs"), (["--flops", "1e21", "--law", "chinchila"], "there is no law 'chinchila'"),
    (["--flops", "1e21", "--law", "nowhere.json"], "there is no such file"), (["--flops", "-1"], "a budget of -1")])
def test_wrong_options(options: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert run_command(["plan", "budget", *options]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
