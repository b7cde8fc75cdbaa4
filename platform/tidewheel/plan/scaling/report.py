"""A fitted law as JSON values and as a page: coefficients with intervals, the runs beside the law, larger budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tidewheel.plan.scaling.budget import short
from tidewheel.plan.scaling.fit import Fit, Interval, Observation
from tidewheel.plan.scaling.laws import FLOPS, Law
from tidewheel.report.page import Html, Page, cards, join, table
from tidewheel.report.plots import Scale, Svg, grid, legend

COLOURS = ("#17936a", "#0f6fc5", "#c2410c", "#8b5cf6", "#64748b", "#b4356e")
VALUES: dict[str, Callable[[Law], float]] = {
    "E": lambda law: law.e, "A": lambda law: law.a, "B": lambda law: law.b, "alpha": lambda law: law.alpha,
    "beta": lambda law: law.beta, "exponent of N": lambda law: law.exponent}
"""Coefficients, and the exponent of the optimal N in C, by name."""
BUDGETS = (1, 10, 100, 1000)
"""Budgets in the table, over the FLOPs of the largest run."""
LEFT, RIGHT, TOP, BOTTOM = 60.0, 1000.0, 30.0, 330.0


def largest_flops(runs: Sequence[Observation]) -> float:
    """Return the FLOPs of the largest run."""
    return max(FLOPS * run.parameters * run.tokens for run in runs)


def as_json(fitted: Fit, runs: Sequence[Observation], names: Sequence[str]) -> dict[str, Any]:
    """Return a fit as JSON values: the law, intervals, budgets and the runs with their residuals.

    Args:
        fitted: the fit.
        runs: what it was fitted to.
        names: of the runs.
    """
    law, largest = fitted.law, largest_flops(runs)
    return {
        "law": {"name": law.name, "source": law.source, "e": law.e, "a": law.a, "b": law.b, "alpha": law.alpha,
                "beta": law.beta, "largest_flops": largest},
        "confidence": fitted.confidence, "residual": fitted.residual,
        "intervals": {name: _limits(fitted.interval(value)) for name, value in VALUES.items()},
        "budgets": [_budget(fitted, times * largest) for times in BUDGETS],
        "runs": [{"name": name, "parameters": run.parameters, "tokens": run.tokens, "loss": run.loss,
                  "law": law.loss(run.parameters, run.tokens)} for name, run in zip(names, runs)]}


def _limits(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]


def _budget(fitted: Fit, flops: float) -> dict[str, Any]:
    """Return the optimum of a budget with the intervals of its parameters, tokens and loss."""
    return {"flops": flops,
            "parameters": _limits(fitted.interval(lambda law: law.optimum(flops).parameters)),
            "tokens": _limits(fitted.interval(lambda law: law.optimum(flops).tokens)),
            "loss": _limits(fitted.interval(lambda law: law.loss(*_best(law, flops))))}


def _best(law: Law, flops: float) -> tuple[float, float]:
    best = law.optimum(flops)
    return best.parameters, best.tokens


def page(values: dict[str, Any]) -> bytes:
    """Return a self-contained HTML page about a fit.

    Args:
        values: the fit, as `as_json` returns it.
    """
    law, percent = values["law"], f"{100 * values['confidence']:g} %"
    made = Page(f"scaling law {law['name']}", subtitle=f"L = E + A / N^alpha + B / D^beta, {law['source']}")
    made.headline(cards([
        ("E", f"{law['e']:.3f}", "nats per token that remain", ""),
        ("alpha", f"{law['alpha']:.3f}", "exponent of N", ""),
        ("beta", f"{law['beta']:.3f}", "exponent of D", ""),
        ("residual", f"{100 * values['residual']:.2f} %", "of the loss, root mean square", "")]))
    made.section("Runs", figure(values), note="Dots are runs, lines the law at their sizes.")
    made.section("Coefficients", table(
        ["", "value", f"{percent} from", "to"],
        [[name, *(f"{value:.4g}" for value in limits)] for name, limits in values["intervals"].items()],
        numeric=(1, 2, 3)), note="Percentiles of fits to resampled runs.")
    made.section("Budgets", table(
        ["FLOPs", "parameters", "tokens", "loss"],
        [[f"{row['flops']:.2g}", *(_between(row[name], short) for name in ("parameters", "tokens")),
          _between(row["loss"], "{:.3f}".format)] for row in values["budgets"]], numeric=(1, 2, 3)),
        note=f"The best size and length by the law, with {percent} intervals. The first row is the largest run's "
             "budget; the further a budget is from it, the less the intervals say.")
    made.section("All runs", table(
        ["run", "parameters", "tokens", "loss", "by the law"],
        [[run["name"], short(run["parameters"]), short(run["tokens"]), f"{run['loss']:.4f}", f"{run['law']:.4f}"]
         for run in values["runs"]], numeric=(1, 2, 3, 4)))
    return made.render()


def _between(limits: Sequence[float], form: Callable[[float], str]) -> str:
    value, low, high = (form(number) for number in limits)
    return f"{value} ({low} to {high})"


def figure(values: dict[str, Any]) -> Html:
    """Draw loss over tokens on a logarithmic axis: runs as dots, and the law as a line for each size.

    Args:
        values: the fit, as `as_json` returns it.
    """
    runs = values["runs"]
    law = Law(**{name: value for name, value in values["law"].items() if name != "largest_flops"})
    sizes = sorted({run["parameters"] for run in runs})
    first, last = min(run["tokens"] for run in runs), max(run["tokens"] for run in runs)
    x = Scale(math.log(first) - 0.1, math.log(last) + 0.1, LEFT, RIGHT)
    losses = [run[key] for run in runs for key in ("loss", "law")]
    margin = 0.05 * (max(losses) - min(losses))
    y = Scale(min(losses) - margin, max(losses) + margin, BOTTOM, TOP)
    svg = Svg(BOTTOM + 50, "loss of runs and of the fitted law, against training tokens")
    grid(svg, y, LEFT, RIGHT, "validation loss, nats per token")
    for tokens in _marks(first, last):
        svg.text(x(math.log(tokens)), BOTTOM + 18, short(tokens), "middle")
    svg.text((LEFT + RIGHT) / 2, BOTTOM + 38, "training tokens", "middle")
    steps = [first * (last / first) ** (step / 60) for step in range(61)]
    for index, size in enumerate(sizes):
        colour = COLOURS[index % len(COLOURS)]
        svg.curve([(x(math.log(tokens)), y(law.loss(size, tokens))) for tokens in steps], colour)
        for run in runs:
            if run["parameters"] == size:
                svg.dot(x(math.log(run["tokens"])), y(run["loss"]), colour, title=f"{run['name']}: {run['loss']:.4f}")
    return join([svg.render(), legend([(COLOURS[index % len(COLOURS)], f"{short(size)} parameters")
                                       for index, size in enumerate(sizes)])])


def _marks(first: float, last: float) -> list[float]:
    """Return round numbers from `first` to `last` on a logarithmic axis, or both ends if none is between them."""
    decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    steps = (1, 2, 5) if len(decades) < 5 else (1,)
    marks = [step * 10.0**decade for decade in decades for step in steps]
    return [mark for mark in marks if first <= mark <= last] or [first, last]
