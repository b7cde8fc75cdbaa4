"""Score a JSONL file of answers with a reward: a result for each record, the mean, and the failures by reason."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.data.readers.lines import numbered_lines
from tidewheel.data.readers.packed import UnreadableFile, opened
from tidewheel.errors import InputError
from tidewheel.parts import is_own, name_of
from tidewheel.rewards.scoring.base import Failure, Reward, Sample, Scores
from tidewheel.rewards.scoring.process import SECONDS, RewardProcess
from tidewheel.storage import Writer, split

logger = logging.getLogger(__name__)

MAX_RECORD_BYTES = 64 << 20
BATCH_RECORDS = 64
BATCH_BYTES = 16 << 20


@dataclass(frozen=True)
class Fields:
    """Names of the fields of a record.

    Args:
        prompt: text; a record may be without it.
        answer: text.
        reference: text or a number; a record may be without it.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    reference: str = "reference"


@dataclass
class Summary:
    """What became of a file.

    Args:
        records: lines that are not blank.
        mean: of the scores, without failures; None if there is no score.
        failures: number of records without a score, by reason.
        examples: the first record without a score, by reason: "line 3: its detail".
    """

    records: int = 0
    mean: float | None = None
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def scored(self) -> int:
        """Number of records with a score."""
        return self.records - self.failures.total()


@dataclass(frozen=True)
class _Line:
    number: int
    identity: str | None
    sample: Sample | Failure


def score_file(source: str, reward: Reward, *, output: str = "", fields: Fields | None = None,
               seconds: int = SECONDS) -> Summary:
    """Score the records of a file, in order. A reward of the user's own runs in a process of its own, with limits.

    Args:
        source: path or URI of a JSONL file; gzip and zstd are decompressed.
        reward: judges the answers.
        output: path or URI of the results, JSON lines in the order of the records; "" writes none.
        fields: names of the fields of a record.
        seconds: processor time for one answer, for a reward of the user's own.

    Raises:
        InputError: the file is missing, damaged or without records. Then no results are written.
        ConfigError: what the reward returns does not fit the batch.
    """
    summary, values = Summary(), array("d")
    with contextlib.ExitStack() as stack:
        own = is_own(name_of(type(reward)))
        judge = stack.enter_context(RewardProcess(reward, seconds=seconds)) if own else reward
        sink = None
        if output:
            store, key = split(output)
            sink = stack.enter_context(store.writer(key))
        for lines in _batches(_lines(source, fields or Fields())):
            samples = [line.sample for line in lines if isinstance(line.sample, Sample)]
            _add(lines, judge.judge(samples), summary, values, sink)
        if not summary.records:
            raise InputError("the file holds no record", where=source, fix="give a JSONL file of answers")
    summary.mean = math.fsum(values) / len(values) if values else None
    logger.debug("scored %d of %d records of %s", summary.scored, summary.records, source)
    return summary


def _add(lines: Sequence[_Line], scores: Scores, summary: Summary, values: array[float], sink: Writer | None) -> None:
    judged = iter([scores.failures.get(index) or float(value) for index, value in enumerate(scores.values)])
    for line in lines:
        outcome = line.sample if isinstance(line.sample, Failure) else next(judged)
        row: dict[str, Any] = {"line": line.number} | ({} if line.identity is None else {"id": line.identity})
        if isinstance(outcome, Failure):
            summary.failures[outcome.reason] += 1
            summary.examples.setdefault(outcome.reason, f"line {line.number}: {outcome.detail}".rstrip(": "))
            row |= {"score": None, "failure": outcome.reason, "detail": outcome.detail}
        else:
            values.append(outcome)
            row["score"] = outcome
        if sink is not None:
            sink.write(json.dumps(row, sort_keys=True).encode() + b"\n")
    summary.records += len(lines)


def _batches(lines: Iterator[tuple[_Line, int]]) -> Iterator[list[_Line]]:
    batch: list[_Line] = []
    size = 0
    for line, length in lines:
        batch.append(line)
        size += length
        if len(batch) == BATCH_RECORDS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _lines(source: str, fields: Fields) -> Iterator[tuple[_Line, int]]:
    """Yield each record with its length in bytes."""
    store, key = split(source)
    try:
        with opened(store, key) as stream:
            for number, _, raw in numbered_lines(stream, MAX_RECORD_BYTES, None):
                if raw is None:
                    raise InputError("the compressed data end too early", where=source, fix="write the file again")
                if raw.strip():
                    yield _parsed(number, raw, fields), len(raw)
    except UnreadableFile as error:
        raise InputError(str(error), where=source, fix="write the file again") from None


def _parsed(number: int, raw: bytes, fields: Fields) -> _Line:
    """Return a record's sample, or why there is none; reasons as in `data.quarantine.REASONS`."""
    if len(raw) > MAX_RECORD_BYTES:
        return _Line(number, None, Failure("record_too_long", f"more than {MAX_RECORD_BYTES} bytes"))
    try:
        record = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        reason = "wrong_encoding" if isinstance(error, UnicodeDecodeError) else "invalid_json"
        return _Line(number, None, Failure(reason, str(error) or type(error).__name__))
    if not isinstance(record, dict):
        return _Line(number, None, Failure("not_an_object", f"a JSON {type(record).__name__}"))
    identity = record.get("id")
    return _Line(number, identity if isinstance(identity, str) else None, _sample(record, fields))


def _sample(record: Mapping[str, Any], fields: Fields) -> Sample | Failure:
    prompt, answer, reference = (record.get(name) for name in (fields.prompt, fields.answer, fields.reference))
    if answer is None:
        return Failure("no_answer", f"no field {fields.answer!r}")
    if type(reference) in (int, float):
        reference = json.dumps(reference)
    for name, value in ((fields.prompt, prompt), (fields.answer, answer), (fields.reference, reference)):
        if value is not None and not isinstance(value, str):
            return Failure("not_text", f"{name!r} is a JSON {type(value).__name__}")
    return Sample(prompt or "", answer, reference)
