"""The model's answers to prompts of validation, side by side over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tidewheel.printable import printable_lines
from tidewheel.report.page import Html, join, shorten, table, tag

NOTE = ("Each prompt was answered with the most likely tokens, by the model before the first step (step 0) and at each "
        "evaluation.")
MAX_STEPS = 5
"""Columns of answers."""
MAX_PROMPTS = 50
MAX_CHARACTERS, MAX_LINES = 400, 6
"""Of a text in a table."""


def section(lines: Sequence[Mapping[str, Any]]) -> list[Html]:
    """Return the section's blocks; [] if no prompt was answered.

    Args:
        lines: of answers.jsonl.
    """
    answers = by_prompt(lines)
    steps = chosen_steps({step for _, given in answers.values() for step in given})
    if not steps:
        return []
    return [comparison(answers, {f"step {step:,}": step for step in steps})]


def by_prompt(lines: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Mapping[str, Any], dict[int, str]]]:
    """Return {id: (a line of the prompt, {step: answer})}, with the last answer of a step, in the order of the log.

    Args:
        lines: of answers.jsonl.
    """
    prompts: dict[str, tuple[Mapping[str, Any], dict[int, str]]] = {}
    for line in lines:
        _, answers = prompts.setdefault(str(line["id"]), (line, {}))
        answers[int(line["step"])] = str(line["answer"])
    return prompts


def chosen_steps(steps: Iterable[int]) -> list[int]:
    """Return the first step, the last one, and others evenly between them, at most `MAX_STEPS`."""
    ordered = sorted(steps)
    if len(ordered) <= MAX_STEPS:
        return ordered
    last = len(ordered) - 1
    return [ordered[round(index * last / (MAX_STEPS - 1))] for index in range(MAX_STEPS)]


def comparison(answers: Mapping[str, tuple[Mapping[str, Any], Mapping[Any, str]]], columns: Mapping[str, Any]) -> Html:
    """Return a table with a row for each prompt.

    Args:
        answers: {id: (a line with the prompt, {key: answer})}.
        columns: {title: key}.
    """
    rows = []
    for line, given in list(answers.values())[:MAX_PROMPTS]:
        rows.append((question(line), *(_text(given.get(key)) for key in columns.values())))
    return tag("div", table(("prompt", *columns), rows), class_="answers")


def question(line: Mapping[str, Any]) -> Html:
    """Return the prompt of a line: its text, or its messages with their roles."""
    if "prompt" in line:
        return _text(str(line["prompt"]))
    messages = line.get("messages") or ()
    return join([tag("div", tag("b", f"{message.get('role', '')}: "), _text(str(message.get("content") or "")))
                 for message in messages])


def _text(text: str | None) -> Html:
    if text is None:
        return tag("span", "–")
    lines = printable_lines(text).strip().split("\n", MAX_LINES)
    shown = shorten("\n".join(lines[:MAX_LINES]) + ("…" if len(lines) > MAX_LINES else ""), MAX_CHARACTERS)
    return tag("span", shown, class_="answer") if shown else tag("i", "nothing")
