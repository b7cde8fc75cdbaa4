"""Make preference pairs of answers by a judge, durably: a unit of records is judged once, and every verdict is kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel import storage
from tidewheel.errors import InputError
from tidewheel.inference.judges import Judge
from tidewheel.storage import Store, content_hash

UNIT = 32
"""Records of a unit: what is lost at most when the command is killed."""
VERDICTS, PAIRS = "verdicts", "preferences/pairs.jsonl"
FORMAT = 1
"""Part of the keys of units; raised when what a unit holds changes."""


@dataclass(frozen=True)
class Judged:
    """What `make_pairs` did.

    Args:
        records: prompts with their answers.
        pairs: of them, those with a best and a worst answer.
        judged: records judged now; the others were there.
        left_out: records without a pair, by reason.
    """

    records: int
    pairs: int
    judged: int
    left_out: Counter[str] = field(default_factory=Counter)


def make_pairs(source: str, judge: Judge, output: str, *,
               on_progress: Callable[[int, int], None] = lambda done, total: None) -> Judged:
    """Judge the answers to each prompt of a file, and write pairs of the best and the worst answer.

    `output` gets verdicts/, a file for each unit with the judge's prompts and answers, and preferences/pairs.jsonl,
    which the pipeline `preferences` reads. Units that exist are not judged again, so a killed command continues.

    Args:
        source: path or URI of a JSONL file; each record has "prompt", a text, and "answers", two texts or more.
        judge: of the answers.
        output: folder.
        on_progress: called with the records done so far and their total.

    Raises:
        InputError: the file is missing, or a record has no prompt or fewer than two answers.
        ConfigError: the judge does not answer.
    """
    records = list(_records(source))
    target = storage.store(output)
    verdicts, judged = verdicts_of(records, judge, target, on_progress)
    left_out = Counter(verdict["left_out"] for verdict in verdicts if "left_out" in verdict)
    pairs = [{name: verdict[name] for name in ("prompt", "chosen", "rejected")}
             for verdict in verdicts if "left_out" not in verdict]
    target.write(PAIRS, as_lines(pairs))
    return Judged(len(records), len(pairs), judged, left_out)


def verdicts_of(records: Sequence[dict[str, Any]], judge: Judge, target: Store,
                on_progress: Callable[[int, int], None]) -> tuple[list[dict[str, Any]], int]:
    """Judge records in units, and return them with their verdicts, and the number judged now.

    Args:
        records: each with "prompt" and "answers".
        judge: of the answers.
        target: folder; units that are in it are not judged again.
        on_progress: see `make_pairs`.

    Raises:
        ConfigError: the judge does not answer.
    """
    verdicts: list[dict[str, Any]] = []
    judged = 0
    for first in range(0, len(records), UNIT):
        unit = records[first:first + UNIT]
        key = content_hash(json.dumps([FORMAT, judge.identity(), list(unit)], sort_keys=True).encode())
        name = f"{VERDICTS}/{key.removeprefix('blake3-')[:32]}.jsonl"
        if not target.exists(name):
            target.write(name, as_lines([_judge(record, judge) for record in unit]))
            judged += len(unit)
        verdicts += [json.loads(line) for line in target.read(name).splitlines()]
        on_progress(len(verdicts), len(records))
    return verdicts, judged


def _records(source: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(storage.read_text(source).splitlines(), 1):
        where = f"{source}:{number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompt, answers = record["prompt"], record["answers"]
        except (ValueError, LookupError, TypeError):
            raise InputError("not a record with prompt and answers", where=where,
                             fix='give lines of {"prompt": "...", "answers": ["...", "..."]}') from None
        if not isinstance(prompt, str) or not isinstance(answers, list) or len(answers) < 2 \
                or not all(isinstance(answer, str) for answer in answers):
            raise InputError("prompt must be a text, and answers at least two texts", where=where,
                             fix="sample at least two answers for each prompt")
        yield {"prompt": prompt, "answers": answers}


def _judge(record: dict[str, Any], judge: Judge) -> dict[str, Any]:
    """Return a record with its verdict: the best and the worst answer, or why there is no pair."""
    prompt, answers = record["prompt"], record["answers"]
    if len(set(answers)) == 1:
        return {**record, "left_out": "equal_answers"}
    verdict = judge.judge(prompt, answers)
    kept = {**record, "scores": verdict.scores, "exchanges": verdict.exchanges}
    best, worst = max(verdict.scores), min(verdict.scores)
    if best == worst:
        return {**kept, "left_out": "tie"}
    return {**kept, "chosen": answers[verdict.scores.index(best)], "rejected": answers[verdict.scores.index(worst)]}


def as_lines(values: list[dict[str, Any]]) -> bytes:
    """Return JSON lines."""
    return "".join(json.dumps(value, sort_keys=True) + "\n" for value in values).encode()
