"""Metrics of items, and their means with standard errors; formulas of lm-evaluation-harness 0.4.13.

`acc_norm` divides the log-likelihood of a choice by its number of characters, `acc_bytes` by its UTF-8 bytes. The
standard error of a mean is sqrt(sum (x - mean)^2 / (n - 1) / n); that of a perplexity follows from it by the delta
method. Weighted figures (bits_per_byte and the like) have none.
"""

from __future__ import annotations

import difflib
import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from tidewheel import expressions
from tidewheel.errors import ConfigError
from tidewheel.inference.tasks import filters
from tidewheel.inference.tasks.config import MetricConfig, TaskConfig
from tidewheel.inference.tasks.filters import UNFILTERED
from tidewheel.inference.tasks.requests import Answer, Item, Likelihood

KNOWN = {
    "multiple_choice": {"acc": "mean", "acc_norm": "mean", "acc_bytes": "mean", "exact_match": "mean"},
    "loglikelihood": {"perplexity": "perplexity", "acc": "mean"},
    "loglikelihood_rolling": {"word_perplexity": "weighted_perplexity", "byte_perplexity": "weighted_perplexity",
                              "bits_per_byte": "bits_per_byte"},
    "generate_until": {"exact_match": "mean"},
}
"""Metrics by output type, and how each is combined over the items."""
DEFAULT = {"multiple_choice": ("acc", "acc_norm"), "loglikelihood": ("perplexity", "acc"),
           "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
           "generate_until": ("exact_match",)}
PUNCTUATION = str.maketrans("", "", string.punctuation)
DIGITS = str.maketrans("", "", string.digits)


@dataclass(frozen=True)
class Metric:
    """A metric of a task.

    Args:
        config: its settings.
        aggregation: how items are combined.
    """

    config: MetricConfig
    aggregation: str


@dataclass(frozen=True)
class Figure:
    """A result.

    Args:
        metric: name of the metric.
        filter: name of the filter; "none" without one.
        value: over all items.
        stderr: standard error; None if there is no formula, or one item.
        items: number of items.
    """

    metric: str
    filter: str
    value: float
    stderr: float | None
    items: int

    @property
    def name(self) -> str:
        """The metric, with the filter if it has one."""
        return self.metric if self.filter == filters.NONE else f"{self.metric},{self.filter}"


def metrics_of(config: TaskConfig, where: str) -> list[Metric]:
    """Return the metrics of a task, after checking its filters.

    Raises:
        ConfigError: the output type has no such metric, it is not combined that way, or a regular expression is not
            valid.
    """
    for chosen in config.filter_list or ():
        filters.check(chosen, where)
    known = KNOWN[config.output_type]
    given = config.metric_list
    if given is None:
        given = [MetricConfig(metric=name) for name in DEFAULT[config.output_type]]
    metrics = []
    for metric in given:
        if metric.metric not in known:
            near = difflib.get_close_matches(metric.metric, known, n=1, cutoff=0.5)
            hint = f", did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
            raise ConfigError(f"output_type {config.output_type} has no metric {metric.metric!r}{hint}", where=where,
                              fix="correct metric_list")
        if metric.aggregation not in (None, known[metric.metric]):
            raise ConfigError(f"{metric.metric} is combined by {known[metric.metric]}, not by {metric.aggregation!r}",
                              where=where, fix="correct or leave out the aggregation in metric_list")
        for pattern in metric.regexes_to_ignore or ():
            try:
                expressions.check(pattern)
            except expressions.ExpressionError as error:
                raise ConfigError(f"metric {metric.metric}: {error}", where=where, fix="correct regexes_to_ignore"
                                  ) from None
        metrics.append(Metric(metric, known[metric.metric]))
    return metrics


def judged(item: Item, answers: Sequence[Answer], config: TaskConfig, metrics: Sequence[Metric]
           ) -> dict[str, dict[str, Any]]:
    """Return {filter: {metric: value}} of one item; a value is a number, or [sum, weight] of a weighted metric.

    Args:
        item: the item.
        answers: to its requests.
        config: the task.
        metrics: of the task.
    """
    if config.output_type == "generate_until":
        text = str(answers[0])
        return {chosen.name: {metric.config.metric: _exact_match(filters.filtered(text, chosen), item.gold,
                                                                 metric.config) for metric in metrics}
                for chosen in config.filter_list or [UNFILTERED]}
    likelihoods = [cast(Likelihood, answer) for answer in answers]
    if config.output_type == "multiple_choice":
        values = _choice_values(item, likelihoods)
    elif config.output_type == "loglikelihood":
        values = {"perplexity": likelihoods[0].log_likelihood, "acc": float(likelihoods[0].greedy)}
    else:
        nats, text = likelihoods[0].log_likelihood, str(item.gold)
        values = {"word_perplexity": [nats, len(re.split(r"\s+", text))],
                  "byte_perplexity": [nats, len(text.encode())], "bits_per_byte": [nats, len(text.encode())]}
    return {filters.NONE: {metric.config.metric: values[metric.config.metric] for metric in metrics}}


def _choice_values(item: Item, likelihoods: Sequence[Likelihood]) -> dict[str, Any]:
    gold = item.gold if isinstance(item.gold, list) else [item.gold]
    sums = [likelihood.log_likelihood for likelihood in likelihoods]
    by_length = [value / len(choice) for value, choice in zip(sums, item.choices)]
    by_bytes = [value / len(choice.encode()) for value, choice in zip(sums, item.choices)]
    return {"acc": float(_first_largest(sums) in gold), "acc_norm": float(_first_largest(by_length) in gold),
            "acc_bytes": float(_first_largest(by_bytes) in gold),
            "exact_match": float(any(likelihoods[index].greedy for index in gold))}


def _first_largest(values: Sequence[float]) -> int:
    return values.index(max(values))


def _exact_match(answer: Any, gold: Any, settings: MetricConfig) -> float:
    golds = gold if isinstance(gold, list) else [gold]
    return float(any(_normal(str(answer), settings) == _normal(str(one), settings) for one in golds))


def _normal(text: str, settings: MetricConfig) -> str:
    for pattern in settings.regexes_to_ignore or ():
        text = expressions.sub(pattern, "", text)
    text = text.lower() if settings.ignore_case else text
    text = text.translate(PUNCTUATION) if settings.ignore_punctuation else text
    return text.translate(DIGITS) if settings.ignore_numbers else text


def figures(values: Sequence[dict[str, dict[str, Any]]], metrics: Sequence[Metric]) -> list[Figure]:
    """Return the results over all items.

    Args:
        values: of each item, from `judged`.
        metrics: of the task.
    """
    results = []
    for name in values[0]:
        for metric in metrics:
            column = [item[name][metric.config.metric] for item in values]
            value, stderr = combined(column, metric.aggregation)
            results.append(Figure(metric.config.metric, name, value, stderr, len(column)))
    return results


def combined(values: Sequence[Any], aggregation: str) -> tuple[float, float | None]:
    """Return a figure over items and its standard error.

    Args:
        values: numbers, or [sum, weight] of weighted figures.
        aggregation: "mean", "perplexity", "weighted_perplexity" or "bits_per_byte".
    """
    if aggregation in ("weighted_perplexity", "bits_per_byte"):
        mean = sum(nats for nats, _ in values) / sum(weight for _, weight in values)
        return (-mean / math.log(2) if aggregation == "bits_per_byte" else math.exp(-mean)), None
    mean = sum(values) / len(values)
    stderr = None
    if len(values) > 1:
        stderr = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    if aggregation == "perplexity":
        return math.exp(-mean), None if stderr is None else math.exp(-mean) * stderr
    return mean, stderr
