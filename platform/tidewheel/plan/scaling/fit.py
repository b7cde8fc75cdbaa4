"""Fit L(N, D) = E + A / N^alpha + B / D^beta to runs, with bootstrap intervals.

As approach 3 of Chinchilla (arXiv:2203.15556, section D.2): the Huber loss, delta 1e-3, between the logarithms of the
losses and LSE(e, a - alpha log N, b - beta log D), from a grid of starting points. Intervals are percentiles of fits to
resampled runs (arXiv:2404.10102, section 3). The sum of the Huber loss is minimised, not its mean: the mean stops BFGS
too early (the same paper, section 4). Fits run side by side in numpy: Levenberg-Marquardt steps on reweighted squares
(Huber, 1981, section 7.8).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidewheel.errors import ConfigError
from tidewheel.plan.scaling.laws import Law

Array = NDArray[np.float64]
DELTA = 1e-3
"""Half-width of the quadratic part of the Huber loss."""
KEPT_STARTS = 48
"""Number of starting points, the best of the grid, that are followed."""
COEFFICIENTS = 5
LEAST_EXPONENT = 1e-3
"""Lower bound of alpha and beta: without it, noisy runs can give a law in which more parameters or tokens do harm."""
_EXPONENTS = np.array([LEAST_EXPONENT, 0.5, 1.0, 1.5, 2.0])
_GRID = (np.arange(-1, 1.5, 0.5), np.arange(0, 26, 5.0), np.arange(0, 26, 5.0), _EXPONENTS, _EXPONENTS)
"""Starting points of e, a, b, alpha and beta (arXiv:2203.15556, section D.2)."""


@dataclass(frozen=True)
class Observation:
    """A finished run."""

    parameters: float
    tokens: float
    loss: float
    """Nats per token."""


@dataclass(frozen=True)
class Interval:
    """A value and the limits of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A fitted law, and the laws of the resampled runs."""

    law: Law
    resampled: tuple[Law, ...]
    confidence: float
    residual: float
    """Root mean square of the residuals of log L."""

    def interval(self, value_of: Callable[[Law], float]) -> Interval:
        """Return the interval of a function of the law.

        Args:
            value_of: function of a law, such as `lambda law: law.optimum(1e21).parameters`.
        """
        tail = 50 * (1 - self.confidence)
        values = [value_of(law) for law in self.resampled]
        low, high = np.percentile(values, [tail, 100 - tail])
        return Interval(value_of(self.law), float(low), float(high))


def fit(observations: Sequence[Observation], *, name: str = "fitted", confidence: float = 0.9, resamples: int = 1000,
        seed: int = 0) -> Fit:
    """Fit a law to runs.

    Args:
        observations: the runs; at least six, with three sizes and three numbers of tokens.
        name: name of the law.
        confidence: of the intervals.
        resamples: number of bootstrap samples.
        seed: of the samples.

    Raises:
        ConfigError: the runs cannot determine the five coefficients, or the losses do not fall with N and with D.
    """
    _check(observations)
    sizes = np.log([run.parameters for run in observations])
    tokens = np.log([run.tokens for run in observations])
    target = np.log([run.loss for run in observations])
    centre = np.array([sizes.mean(), tokens.mean()])
    problem = _Problem(sizes - centre[0], tokens - centre[1], target)
    whole = np.ones((1, len(observations)))
    starts = _best_starts(problem, centre, whole)
    candidates, costs = problem.minimise(starts, np.repeat(whole, len(starts), axis=0))
    best = candidates[int(np.argmin(costs))]
    weights = _resampled(len(observations), resamples, seed)
    _check_exponents(best)
    others, _ = problem.minimise(np.repeat(best[None], resamples, axis=0), weights)
    laws = [_law(row, centre, name, len(observations)) for row in (best, *others)]
    residuals = target - problem.predict(best[None])[0][0]
    return Fit(laws[0], tuple(laws[1:]), confidence, float(np.sqrt(np.mean(residuals**2))))


class _Problem:
    """Runs with centred logarithms of N and D. Coefficients are rows (e, a, b, alpha, beta), many at a time."""

    def __init__(self, sizes: Array, tokens: Array, target: Array) -> None:
        self._sizes, self._tokens, self._target = sizes, tokens, target

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Return log L, [B, runs], and its derivatives by the coefficients, [B, runs, 5]."""
        e, a, b, alpha, beta = (rows[:, index, None] for index in range(COEFFICIENTS))
        terms = np.stack(np.broadcast_arrays(e, a - alpha * self._sizes, b - beta * self._tokens), axis=-1)
        largest = terms.max(axis=-1, keepdims=True)
        powers = np.exp(terms - largest)
        total = powers.sum(axis=-1, keepdims=True)
        shares = powers / total
        slopes = np.concatenate([shares, -shares[..., 1:2] * self._sizes[:, None],
                                 -shares[..., 2:3] * self._tokens[:, None]], axis=-1)
        return (largest + np.log(total))[..., 0], slopes

    def cost(self, rows: Array, weights: Array) -> Array:
        """Return the weighted sums of the Huber loss, [B]."""
        distance = np.abs(self._target - self.predict(rows)[0])
        huber = np.where(distance <= DELTA, distance**2 / 2, DELTA * (distance - DELTA / 2))
        return np.asarray((weights * huber).sum(axis=1))

    def minimise(self, rows: Array, weights: Array, steps: int = 150) -> tuple[Array, Array]:
        """Return the coefficients at local minima, [B, 5], and their costs, [B].

        Args:
            rows: starting points, [B, 5].
            weights: number of times that each run counts, [B, runs].
            steps: largest number of steps.
        """
        rows, costs = rows.copy(), self.cost(rows, weights)
        damping = np.full(len(rows), 1e-2)
        active = np.arange(len(rows))
        for _ in range(steps):
            here, counts = rows[active], weights[active]
            predicted, slopes = self.predict(here)
            residuals = self._target - predicted
            reweighted = counts * DELTA / np.maximum(np.abs(residuals), DELTA)
            curvature = np.einsum("bri,br,brj->bij", slopes, reweighted, slopes, optimize=True)
            downhill = np.einsum("bri,br->bi", slopes, reweighted * residuals)
            scale = np.einsum("bii->bi", curvature)
            damped = curvature + np.einsum("bi,ij->bij", damping[active, None] * scale + 1e-12, np.eye(COEFFICIENTS))
            tried = here + np.linalg.solve(damped, downhill[..., None])[..., 0]
            tried[:, 3:] = tried[:, 3:].clip(LEAST_EXPONENT)
            new_costs = self.cost(tried, counts)
            better = new_costs < costs[active]
            gain = np.where(better, (costs[active] - new_costs) / costs[active].clip(1e-300), 0.0)
            rows[active[better]] = tried[better]
            costs[active[better]] = new_costs[better]
            damping[active] = np.clip(damping[active] * np.where(better, 0.3, 8.0), 1e-9, 1e9)
            going = (better & (gain > 1e-6)) | (~better & (damping[active] < 1e8))
            active = active[going]
            if not len(active):
                break
        return rows, costs


def _best_starts(problem: _Problem, centre: Array, weights: Array) -> Array:
    """Return the points of the grid with the smallest costs, [KEPT_STARTS, 5], in centred coordinates."""
    grid = np.array(list(itertools.product(*_GRID)))
    grid[:, 1] -= grid[:, 3] * centre[0]
    grid[:, 2] -= grid[:, 4] * centre[1]
    costs = problem.cost(grid, weights)
    return np.asarray(grid[np.argsort(costs, kind="stable")[:KEPT_STARTS]])


def _resampled(runs: int, resamples: int, seed: int) -> Array:
    """Return how often each run is in each bootstrap sample, [resamples, runs]."""
    counts = np.random.default_rng(seed).multinomial(runs, np.full(runs, 1 / runs), size=resamples)
    return counts.astype(np.float64)


def _law(row: Array, centre: Array, name: str, runs: int) -> Law:
    e, a, b, alpha, beta = (float(value) for value in row)
    return Law(name, f"fitted to {runs} runs", float(np.exp(e)), float(np.exp(a + alpha * centre[0])),
               float(np.exp(b + beta * centre[1])), alpha, beta)


def _check(observations: Sequence[Observation]) -> None:
    sizes = len({round(run.parameters) for run in observations})
    tokens = len({round(run.tokens) for run in observations})
    if len(observations) <= COEFFICIENTS or sizes < 3 or tokens < 3:
        raise ConfigError(f"{len(observations)} runs of {sizes} sizes and {tokens} numbers of tokens cannot determine "
                          f"the {COEFFICIENTS} coefficients of L = E + A / N^alpha + B / D^beta", where="scaling law",
                          fix="give at least six runs, of three sizes or more and of three lengths or more")
    if wrong := [run for run in observations if not (run.parameters > 0 and run.tokens > 0 and run.loss > 0)]:
        raise ConfigError(f"{wrong[0]} has a value that is not positive", where="scaling law",
                          fix="leave out runs that diverged")


def _check_exponents(row: Array) -> None:
    """Check that the loss falls with parameters and with tokens.

    Raises:
        ConfigError: it does not.
    """
    for what, exponent in (("parameters", row[3]), ("tokens", row[4])):
        if exponent <= LEAST_EXPONENT:
            raise ConfigError(f"the losses do not fall with the number of {what}, within their noise",
                              where="scaling law", fix="give runs that differ more, a larger validation set, or a "
                              "learning rate that fits each size")
