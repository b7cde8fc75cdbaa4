"""Filters of generated text, which find the answer in it; as in lm-evaluation-harness."""

from __future__ import annotations

from typing import Any

from tidewheel import expressions
from tidewheel.errors import ConfigError
from tidewheel.inference.tasks.config import FilterConfig, FilterStep

NONE = "none"
"""Name of the filter that changes nothing."""
UNFILTERED = FilterConfig(name=NONE, filter=[FilterStep(function="take_first")])


def filtered(text: str, chosen: FilterConfig) -> Any:
    """Return the answer that a filter finds in a text.

    Args:
        text: what the model wrote.
        chosen: the filter.

    Raises:
        ExpressionError: a regular expression takes too much time or memory.
    """
    answer: Any = text
    for step in chosen.filter:
        answer = _apply(answer, step)
    return answer


def check(chosen: FilterConfig, where: str) -> None:
    """Check the regular expressions of a filter.

    Args:
        chosen: the filter.
        where: for error messages.

    Raises:
        ConfigError: one is not valid, or a map has no mapping.
    """
    for step in chosen.filter:
        try:
            expressions.check(step.regex_pattern)
        except expressions.ExpressionError as error:
            raise ConfigError(f"filter {chosen.name}: {error}", where=where, fix="correct regex_pattern") from None


def _apply(answer: Any, step: FilterStep) -> Any:
    if step.function == "take_first":
        return answer
    if step.function == "map":
        return (step.mapping_dict or {}).get(answer, step.default_value)
    text = answer if isinstance(answer, str) else ""
    if step.function == "regex":
        return _found(text, step)
    if step.function == "remove_whitespace":
        return text.strip()
    return text.lower() if step.function == "lowercase" else text.upper()


def _found(text: str, step: FilterStep) -> str:
    matches = expressions.findall(step.regex_pattern, text)
    if not matches:
        return step.fallback
    if not -len(matches) <= step.group_select < len(matches):
        return step.fallback
    match = matches[step.group_select]
    if isinstance(match, tuple):
        match = next((group for group in match if group), step.fallback)
    return str(match).strip()
