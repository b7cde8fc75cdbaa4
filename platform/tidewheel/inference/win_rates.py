"""How often a judge prefers the answers of one model to those of another, durably.

Both models answer the same prompts in units, which are kept. The judge sees each pair of answers, a language model in
both orders; a preference that changes with the order is a tie. The win rate counts a tie as half a win. Its interval is
a percentile bootstrap over prompts (Efron, 1979) with a fixed seed: values are 0, 1/2 and 1, for which a binomial
interval is not made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from tidewheel import storage
from tidewheel.errors import InputError
from tidewheel.inference.judges import Judge
from tidewheel.inference.judging import UNIT, as_lines, verdicts_of
from tidewheel.inference.tasks.requests import Generate, Scorer
from tidewheel.storage import Store, content_hash

RESAMPLES, SEED, SHARE = 10_000, 0, 0.95
ANSWERS, RESULT = "answers", "win_rate.json"
FORMAT = 1
"""Part of the keys of answers; raised when equal models write other answers."""
OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, the prompts done so far and their total."""


@dataclass(frozen=True)
class Writing:
    """How both models answer.

    Args:
        tokens: maximum number of new tokens of an answer.
        temperature: of the draws; 0: take the most likely token.
        seed: of the draws; each prompt has one of its own.
        chat: put each prompt into the model's chat template.
    """

    tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    chat: bool = False


@dataclass(frozen=True)
class WinRate:
    """The verdicts on two models.

    Args:
        prompts: number of prompts.
        wins: prompts whose answer of the first model is better.
        losses: prompts whose answer of the second model is better.
        ties: all others; equal answers are among them.
        equal: prompts with equal answers, which the judge was not asked about.
        win_rate: wins and half the ties, as a share of the prompts.
        low: lower end of the 95 % interval.
        high: upper end.
        judged: prompts judged now; the others were there.
    """

    prompts: int
    wins: int
    losses: int
    ties: int
    equal: int
    win_rate: float
    low: float
    high: float
    judged: int


def compare(first: Scorer, second: Scorer, source: str, judge: Judge, output: str, writing: Writing, *,
            about: dict[str, Any] | None = None,
            on_progress: OnProgress = lambda what, done, total: None) -> WinRate:
    """Let two models answer the prompts of a file, and a judge compare them.

    `output` gets answers/ and verdicts/, a file for each unit with the judge's prompts and answers, and win_rate.json.
    Units that exist are not made again, so a killed command continues.

    Args:
        first: the model whose wins count.
        second: the other model.
        source: path or URI of a JSONL file; each record has "prompt", a text.
        judge: of the answers.
        output: folder.
        writing: how the models answer.
        about: what to write into the result, such as the models' names.
        on_progress: see `OnProgress`.

    Raises:
        InputError: the file is missing, a record has no prompt, or a prompt does not fit into a model's context.
        ConfigError: the judge does not answer.
    """
    prompts = read_prompts(source)
    target = storage.store(output)
    written = []
    for name, scorer in (("first model", first), ("second model", second)):
        written.append(answers_of(scorer, prompts, target, writing, partial(on_progress, name)))
    records = [{"prompt": prompt, "answers": [one, other]} for prompt, one, other in zip(prompts, *written)]
    verdicts, judged = verdicts_of(records, judge, target, partial(on_progress, "judge"))
    result = summarised(verdicts, judged)
    values = {key: value for key, value in asdict(result).items() if key != "judged"}
    target.write_json(RESULT, {
        **(about or {}), **values, "interval": f"{SHARE:.0%} percentile bootstrap over prompts, {RESAMPLES} resamples, "
        f"seed {SEED}", "judge": judge.identity(), "writing": asdict(writing)})
    return result


def summarised(verdicts: Sequence[dict[str, Any]], judged: int) -> WinRate:
    """Return the win rate of the first answers.

    Args:
        verdicts: records as `judging.verdicts_of` returns them.
        judged: of them, those judged now.
    """
    values = [_value(verdict) for verdict in verdicts]
    low, high = interval(values)
    wins, losses = values.count(1.0), values.count(0.0)
    equal = sum(verdict.get("left_out") == "equal_answers" for verdict in verdicts)
    return WinRate(len(values), wins, losses, len(values) - wins - losses, equal, sum(values) / len(values), low, high,
                   judged)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean of values."""
    drawn = np.random.default_rng(SEED)
    given = np.asarray(values)
    means = [given[drawn.integers(0, len(given), len(given))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)


def _value(verdict: dict[str, Any]) -> float:
    if "left_out" in verdict:
        return 0.5
    first, second = verdict["scores"]
    return 1.0 if first > second else 0.0


def answers_of(scorer: Scorer, prompts: Sequence[str], target: Store, writing: Writing,
               on_progress: Callable[[int, int], None]) -> list[str]:
    """Return a model's answers to prompts; units that exist are read.

    Args:
        scorer: the model.
        prompts: the prompts.
        target: folder.
        writing: how the model answers.
        on_progress: called with the prompts done so far and their total.

    Raises:
        InputError: a prompt does not fit into the model's context.
    """
    answers: list[str] = []
    for first in range(0, len(prompts), UNIT):
        unit = list(prompts[first:first + UNIT])
        asked = [FORMAT, scorer.identity(), asdict(writing), first, unit]
        key = content_hash(json.dumps(asked, sort_keys=True).encode())
        name = f"{ANSWERS}/{key.removeprefix('blake3-')[:32]}.jsonl"
        if not target.exists(name):
            requests = [Generate(scorer.chat([{"role": "user", "content": prompt}]) if writing.chat else prompt,
                                 tokens=writing.tokens, temperature=writing.temperature, seed=writing.seed + first + at)
                        for at, prompt in enumerate(unit)]
            texts = scorer.answers(requests, chat=writing.chat)
            target.write(name, as_lines([{"prompt": prompt, "answer": text} for prompt, text in zip(unit, texts)]))
        answers += [json.loads(line)["answer"] for line in target.read(name).splitlines()]
        on_progress(len(answers), len(prompts))
    return answers


def read_prompts(source: str) -> list[str]:
    """Return the prompts of a file; see `compare`.

    Raises:
        InputError: the file is missing, or a record has no prompt.
    """
    try:
        text = storage.read_text(source)
    except FileNotFoundError:
        raise InputError("there is no such file", where=source, fix="give a JSONL file of prompts") from None
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, LookupError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise InputError("not a record with a prompt", where=f"{source}:{number}",
                             fix='give lines of {"prompt": "..."}')
        prompts.append(prompt)
    if not prompts:
        raise InputError("there are no prompts", where=source, fix='give lines of {"prompt": "..."}')
    return prompts
