"""What to train with a budget: parameters and tokens by every scaling law, learning rate and batch by every rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pydantic

from tidewheel.config import Config, build
from tidewheel.errors import ConfigError
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.scaling.laws import DEFAULT, FLOPS, LAWS, Frontier, Law, Optimum
from tidewheel.plan.scaling.rates import Rate, rates
from tidewheel.storage import read_text

DEFAULT_MFU = 0.4
"""Llama 3 405B reached 38 to 43 % of the bf16 peak (arXiv:2407.21783, table 4)."""
SECONDS_A_DAY = 86_400


class FittedLaw(Config):
    """The coefficients of a `law.json`, which a `tw.ScalingLaw` writes."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

    name: str
    source: str
    e: float
    a: float
    b: float
    alpha: float
    beta: float
    largest_flops: float
    """FLOPs of the largest run that it was fitted to."""

    @property
    def law(self) -> Law:
        """The law itself."""
        return Law(**self.model_dump(exclude={"largest_flops"}))


@dataclass(frozen=True)
class Suggestion:
    """What one law says about a budget."""

    law: str
    source: str
    optimum: Optimum

    @property
    def tokens_per_parameter(self) -> float:
        """Tokens per parameter."""
        return self.optimum.tokens / self.optimum.parameters


@dataclass(frozen=True)
class Budget:
    """A budget, and what to do with it."""

    flops: float
    how: str
    """Where the number of FLOPs comes from."""
    suggestions: tuple[Suggestion, ...]
    chosen: Suggestion
    """The one that learning rate and batch are for."""
    rates: tuple[Rate, ...]
    notes: tuple[str, ...]


def flops_of(cluster: ClusterConfig, days: float, mfu: float) -> float:
    """Return the model FLOPs that a cluster does in a number of days.

    Args:
        cluster: the GPUs.
        days: days of training.
        mfu: share of the dense bf16 peak.
    """
    return cluster.gpus * cluster.kind.peak * mfu * days * SECONDS_A_DAY


def budget(flops: float, how: str, *, law: str = "", parameters: float | None = None,
           batch_tokens: float | None = None) -> Budget:
    """Return what to train with `flops`.

    Args:
        flops: the budget.
        how: where the number comes from.
        law: name of the published law, or a law.json, to choose the size by; "": the first of `LAWS`.
        parameters: N, instead of the law's optimum.
        batch_tokens: tokens of a step; None: Step Law's.

    Raises:
        ConfigError: there is no such law, or the budget is not positive.
    """
    if not flops > 0:
        raise ConfigError(f"a budget of {flops:g} FLOPs", where="plan budget", fix="give more than 0")
    notes = ["N counts all parameters; C = 6 N D"]
    laws: dict[str, Law | Frontier] = dict(LAWS)
    if law and law not in LAWS:
        fitted = read_law(law)
        laws = {fitted.name: fitted.law, **laws}
        law = fitted.name
        notes.append(f"{law} was fitted to runs of at most {fitted.largest_flops:.2g} FLOPs; the budget is "
                     f"{flops / fitted.largest_flops:,.0f} times that")
    suggestions = tuple(Suggestion(name, item.source, item.optimum(flops)) for name, item in laws.items())
    chosen = next(item for item in suggestions if item.law == (law or DEFAULT))
    if parameters is not None:
        tokens = flops / FLOPS / parameters
        used = laws[chosen.law]
        loss = used.loss(parameters, tokens) if isinstance(used, Law) else None
        chosen = Suggestion(chosen.law, f"--parameters; loss by {chosen.source}", Optimum(parameters, tokens, loss))
    best = chosen.optimum
    return Budget(flops, how, suggestions, chosen,
                  tuple(rates(best.parameters, best.tokens, best.loss, batch_tokens)), tuple(notes))


def read_law(uri: str) -> FittedLaw:
    """Read a law.json.

    Raises:
        ConfigError: there is no such file, or it has no law.
    """
    if not uri.endswith(".json"):
        raise ConfigError(f"there is no law {uri!r}", where="--law",
                          fix=f"use {', '.join(LAWS)}, or the law.json that a tw.ScalingLaw wrote")
    try:
        text = read_text(uri if "://" in uri else str(Path(uri).absolute()))
    except FileNotFoundError:
        raise ConfigError("there is no such file", where=uri, fix="give the law.json that a tw.ScalingLaw wrote"
                          ) from None
    values = pydantic.TypeAdapter(dict[str, Any]).validate_json(text)
    return build(FittedLaw, values.get("law", values), where=uri)


def law_rows(item: Budget) -> list[dict[str, str]]:
    """Return a row per law."""
    return [{"law": suggestion.law, "parameters": short(suggestion.optimum.parameters),
             "tokens": short(suggestion.optimum.tokens),
             "tokens per parameter": f"{suggestion.tokens_per_parameter:.1f}",
             "loss": "" if suggestion.optimum.loss is None else f"{suggestion.optimum.loss:.3f}",
             "source": suggestion.source} for suggestion in item.suggestions]


def rate_rows(found: Sequence[Rate], tokens: float) -> list[dict[str, str]]:
    """Return a row per rule of learning rate and batch.

    Args:
        found: what the rules say.
        tokens: D.
    """
    return [{"rule": rate.rule, "learning rate": "" if rate.learning_rate is None else f"{rate.learning_rate:.2e}",
             "batch, tokens": "" if rate.batch_tokens is None else short(rate.batch_tokens),
             "steps": "" if rate.batch_tokens is None else f"{tokens / rate.batch_tokens:,.0f}",
             "source": rate.source} for rate in found]


def short(number: float) -> str:
    """Return a number with three digits and a unit: 70.3 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def as_json(item: Budget) -> dict[str, Any]:
    """Return a budget as JSON values."""
    return asdict(item)
