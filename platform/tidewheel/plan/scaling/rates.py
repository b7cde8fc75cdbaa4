"""Peak learning rate and batch size by published rules. A rule is a starting point for a search, not its end.

All rules are for AdamW-like optimizers and tokens of a batch, except `linear`, which was found for SGD.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """What one rule says."""

    rule: str
    learning_rate: float | None
    """Peak learning rate; None if the rule gives none."""
    batch_tokens: float | None
    """Tokens of a step; None if the rule gives none."""
    source: str


@dataclass(frozen=True)
class Published:
    """Peak learning rate and largest batch of a published run."""

    name: str
    parameters: float
    learning_rate: float
    batch_tokens: float
    source: str


_GPT3 = "arXiv:2005.14165, table 2.1"
PUBLISHED = (
    Published("GPT-3 Small", 125e6, 6.0e-4, 0.5e6, _GPT3), Published("GPT-3 Medium", 350e6, 3.0e-4, 0.5e6, _GPT3),
    Published("GPT-3 Large", 760e6, 2.5e-4, 0.5e6, _GPT3), Published("GPT-3 XL", 1.3e9, 2.0e-4, 1e6, _GPT3),
    Published("GPT-3 2.7B", 2.7e9, 1.6e-4, 1e6, _GPT3),
    Published("LLaMA-2 7B", 6.74e9, 3.0e-4, 4e6, "arXiv:2307.09288, section 2.2 and table 1"),
    Published("LLaMA-2 70B", 69e9, 1.5e-4, 4e6, "arXiv:2307.09288, section 2.2 and table 1"),
    Published("GPT-3 175B", 175e9, 0.6e-4, 3.2e6, _GPT3),
    Published("Llama 3 405B", 405e9, 8.0e-5, 16e6, "arXiv:2407.21783, section 3.4.1"))
"""Runs that `linear` and `square_root` start from."""


def deepseek(parameters: float, tokens: float) -> Rate:
    """Return eta = 0.3118 C^-0.1250 and B = 0.2920 C^0.3271 tokens, fitted from 1e17 to 2e19 FLOPs."""
    flops = 6 * parameters * tokens
    return Rate("deepseek", 0.3118 * flops**-0.1250, 0.2920 * flops**0.3271, "arXiv:2401.02954, section 3.1")


def step_law(parameters: float, tokens: float) -> Rate:
    """Return eta = 1.79 N^-0.713 D^0.307 and B = 0.58 D^0.571 tokens; its N has no embedding."""
    return Rate("step_law", 1.79 * parameters**-0.713 * tokens**0.307, 0.58 * tokens**0.571,
                "arXiv:2503.04715, equation 1")


def kaplan(parameters: float, loss: float | None) -> Rate:
    """Return eta = 0.003239 - 0.0001395 ln N and the critical batch 2e8 tokens / L^(1 / 0.21) at the loss reached.

    Args:
        parameters: N, without the embedding.
        loss: final loss in nats per token; None: no batch.
    """
    rate = 0.003239 - 0.0001395 * math.log(parameters)
    batch = None if loss is None else 2e8 / loss ** (1 / 0.21)
    return Rate("kaplan", rate if rate > 0 else None, batch, "arXiv:2001.08361, equation D.1 and section 5.1")


def nearest(parameters: float) -> Published:
    """Return the published run whose size is nearest on a logarithmic scale."""
    return min(PUBLISHED, key=lambda run: abs(math.log(run.parameters / parameters)))


def scaled(parameters: float, batch_tokens: float) -> list[Rate]:
    """Return the rate of the nearest published run, scaled to another batch linearly and by the square root.

    Args:
        parameters: N.
        batch_tokens: the batch to scale to.
    """
    run = nearest(parameters)
    ratio = batch_tokens / run.batch_tokens
    base = f"from {run.name}'s {run.learning_rate:g} at {run.batch_tokens / 1e6:g} M tokens ({run.source})"
    return [Rate("square_root", run.learning_rate * math.sqrt(ratio), batch_tokens,
                 f"Adam: arXiv:2205.10287, section 2; {base}"),
            Rate("linear", run.learning_rate * ratio, batch_tokens, f"SGD: arXiv:1706.02677, section 2.1; {base}")]


def rates(parameters: float, tokens: float, loss: float | None, batch_tokens: float | None) -> list[Rate]:
    """Return what every rule says about a run.

    Args:
        parameters: N.
        tokens: D.
        loss: predicted final loss in nats per token, if known.
        batch_tokens: tokens of a step, which `square_root` and `linear` scale to; None: Step Law's.
    """
    fitted = step_law(parameters, tokens)
    return [fitted, deepseek(parameters, tokens), kaplan(parameters, loss),
            *scaled(parameters, batch_tokens or fitted.batch_tokens or 0.0)]
