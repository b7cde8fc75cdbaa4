"""Scaling laws: the loss as a function of parameters and tokens, and the best parameters and tokens for a budget.

N is the number of parameters, D the number of training tokens, C = 6 N D the training FLOPs (arXiv:2001.08361,
section 2.1). Losses are in nats per token; they depend on the tokenizer and the text, so only the optimum carries over
from the published fits to other data, and that roughly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FLOPS = 6.0
"""Training FLOPs per parameter and token: 2 forward, 4 backward."""


@dataclass(frozen=True)
class Optimum:
    """The best use of a budget."""

    parameters: float
    tokens: float
    loss: float | None
    """Predicted loss in nats per token; None if the law predicts only the optimum."""


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta."""

    name: str
    source: str
    e: float
    """Irreducible loss."""
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss in nats per token."""
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    @property
    def exponent(self) -> float:
        """Exponent of the optimal N in C, beta / (alpha + beta)."""
        return self.beta / (self.alpha + self.beta)

    def optimum(self, flops: float) -> Optimum:
        """Return N and D of the smallest loss with 6 N D = `flops`.

        N = G (C / 6)^(beta / (alpha + beta)), G = (alpha A / (beta B))^(1 / (alpha + beta)) (arXiv:2203.15556,
        equation 4).
        """
        scale = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        parameters = scale * (flops / FLOPS) ** self.exponent
        tokens = flops / FLOPS / parameters
        return Optimum(parameters, tokens, self.loss(parameters, tokens))


@dataclass(frozen=True)
class Frontier:
    """Optimal parameters as a power law of the budget, through published points."""

    name: str
    source: str
    points: tuple[tuple[float, float], ...]
    """Published (N, C), at least two."""

    def optimum(self, flops: float) -> Optimum:
        """Return N on the least-squares line through the logarithms of the points, and D = C / 6 N."""
        slope, intercept = line([(math.log(flops), math.log(size)) for size, flops in self.points])
        parameters = math.exp(intercept + slope * math.log(flops))
        return Optimum(parameters, flops / FLOPS / parameters, None)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return slope and intercept of the least-squares line through points (x, y)."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return slope, mean_y - slope * mean_x


_CHINCHILLA = "arXiv:2203.15556"
_SIZES = (4e8, 1e9, 10e9, 67e9, 175e9, 280e9, 520e9, 1e12, 10e12)
_APPROACH1 = (1.92e19, 1.21e20, 1.23e22, 5.76e23, 3.85e24, 9.90e24, 3.43e25, 1.27e26, 1.30e28)
_APPROACH2 = (1.84e19, 1.20e20, 1.32e22, 6.88e23, 4.54e24, 1.18e25, 4.19e25, 1.59e26, 1.75e28)

LAWS: Mapping[str, Law | Frontier] = {law.name: law for law in (
    # the refit of approach 3 to the points of the paper's figure 4; the paper's own coefficients do not fit them
    Law("besiroglu", "arXiv:2404.10102, approach 3 fitted again", 1.8172, 482.01, 2085.43, 0.3478, 0.3658),
    Frontier("chinchilla1", f"{_CHINCHILLA}, approach 1: best of training curves, table 3",
             tuple(zip(_SIZES, _APPROACH1))),
    Frontier("chinchilla2", f"{_CHINCHILLA}, approach 2: IsoFLOP profiles, table A3", tuple(zip(_SIZES, _APPROACH2))),
    # the paper's text rounds the exponents to 0.34 and 0.28; table A3 follows from these, of its LaTeX source
    Law("chinchilla3", f"{_CHINCHILLA}, approach 3: loss fitted, equation 10", 1.6934, 406.4, 410.7, 0.3392, 0.2849),
)}
"""Published laws by name; the first is the default."""
DEFAULT = next(iter(LAWS))
