"""Read rows of preference sets as arrays from memory-mapped files.

A row of a pair has two or three parts of L tokens side by side, each padded at its end: the chosen and the rejected
sequence and, if asked for, a mismatched one: the prompt of the pair with the chosen answer of the row before it in the
shard (of the last row for the first), cut to L tokens. The loss mask marks the tokens of answers. A row of an unpaired
set has the one answer that there is in the place of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.shards.format import only_batch, preference_schema
from tidewheel.shards.manifest import (
    PARTS,
    PREFERENCES,
    REBUILD,
    ROLLOUTS,
    WITH_MISMATCHED,
    Manifest,
    read_manifest,
)
from tidewheel.shards.opened import OnDamage, OpenedSet, Rows
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.references import Column
from tidewheel.shards.rollouts import RolloutSet
from tidewheel.shards.teachers import TeacherTokens


@dataclass(frozen=True)
class PairShard:
    """The columns of one memory-mapped shard of n pairs. Nothing is copied."""

    prompts: np.ndarray
    """[n] int32: tokens of each prompt."""
    chosen: tuple[np.ndarray, np.ndarray]
    """All tokens, and int32 [n + 1]: sequence r has the tokens from bound r to bound r + 1."""
    rejected: tuple[np.ndarray, np.ndarray]
    margins: np.ndarray | None = None
    """[n] fp32; None: the set has none."""
    steps: tuple[np.ndarray, np.ndarray] | None = None
    """Labels int8 of all tokens of answers, and bounds; None: the set has none."""

    @classmethod
    def of(cls, batch: pa.RecordBatch, manifest: Manifest) -> PairShard:
        """Return the columns of a batch of `preference_schema`."""
        return cls(batch.column("prompt_length").to_numpy(), _flat(batch.column("chosen")),
                   _flat(batch.column("rejected")), batch.column("margin").to_numpy() if manifest.margins else None,
                   _flat(batch.column("step_labels")) if manifest.step_labels else None)

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the chosen and of the rejected sequences, int32 [n] each."""
        return np.diff(self.chosen[1]), np.diff(self.rejected[1])

    def sequence(self, row: int, part: int) -> np.ndarray:
        """Return the tokens of a part of a row: 0 chosen, 1 rejected, 2 mismatched (not yet cut)."""
        if part == WITH_MISMATCHED - 1:
            other = row - 1 if row else len(self.prompts) - 1
            answer = self.sequence(other, self.answer(other))[self.prompts[other]:]
            return np.concatenate((self.sequence(row, 0)[:self.prompts[row]], answer))
        tokens, bounds = self.rejected if part else self.chosen
        return tokens[bounds[row]:bounds[row + 1]]

    def answer(self, row: int) -> int:
        """Return the first part of a row that has an answer: 0, or 1 of an undesirable answer without a pair."""
        bounds = self.chosen[1]
        return int(bounds[row + 1] - bounds[row] == self.prompts[row])


def problem_of(shard: PairShard, manifest: Manifest) -> str:
    """Return what is wrong with the lengths of a shard's rows and with their labels, "" if nothing is.

    Args:
        shard: the shard.
        manifest: of its set.
    """
    chosen, rejected = shard.lengths
    shortest, longest = np.minimum(chosen, rejected), np.maximum(chosen, rejected)
    if shortest.min() < 0 or longest.max() > manifest.sequence_length:
        return f"a sequence has {longest.max()} tokens, at most {manifest.sequence_length} are allowed"
    if manifest.unpaired and np.any(shortest != shard.prompts):
        return "a row of an unpaired set has two answers"
    if shard.prompts.min() < 0 or np.any(shard.prompts >= (longest if manifest.unpaired else shortest)):
        return "a prompt is not shorter than its sequence"
    if shard.margins is not None and not np.isfinite(shard.margins).all():
        return "a margin is not a number"
    if shard.steps is not None and (np.any(np.diff(shard.steps[1]) != chosen - shard.prompts)
                                    or not np.isin(shard.steps[0], (-1, 0, 1)).all()):
        return "an answer has not one label, -1, 0 or 1, for each token"
    return ""


def equal_rows(shard: PairShard) -> list[int]:
    """Return the rows whose two answers are equal."""
    chosen, rejected = shard.lengths
    return [row for row in np.flatnonzero(chosen == rejected).tolist()
            if np.array_equal(shard.sequence(row, 0), shard.sequence(row, 1))]


class PairSet(OpenedSet[PairShard]):
    """A preference set opened for reading. Safe to use from several threads.

    Attributes:
        parts: sequences in each row of `Rows`, `PARTS` or `WITH_MISMATCHED`.
        column: log-probabilities under a reference model; None: they are not read.
    """

    KIND = PREFERENCES
    parts: int = PARTS
    column: Column | None = None

    def reading(self, parts: int, column: Column | None = None) -> Self:
        """Choose what rows hold, and return the set."""
        self.parts, self.column = parts, column
        return self

    def _opened(self, path: Path, index: int) -> PairShard:
        info, where = self.manifest.shards[index], self.store.at(self.manifest.shards[index].name)
        batch = only_batch(path, where)
        schema = preference_schema(self.manifest.token_dtype, self.manifest.margins, self.manifest.step_labels)
        if batch is None or not batch.schema.equals(schema) \
                or batch.num_rows != info.rows or any(column.null_count for column in batch.columns):
            raise ShardError(f"the shard's columns or rows are not those of its manifest, which has {info.rows} rows",
                             where=where, fix=REBUILD)
        shard = PairShard.of(batch, self.manifest)
        if problem := problem_of(shard, self.manifest):
            raise self._damaged(index, problem)
        if rows := equal_rows(shard):
            raise ShardError(f"both answers of row {rows[0]} are equal, so it prefers neither", where=where,
                             fix="leave such pairs out: `tidewheel data run` drops them")
        return shard

    def _lengths(self, shard: PairShard) -> np.ndarray:
        return np.maximum(*shard.lengths)

    def _gather(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        manifest, count, length = self.manifest, len(shards), self.manifest.sequence_length
        unpaired = manifest.unpaired
        parts = self.parts - unpaired
        shape = (count, parts, length)
        tokens = np.full(shape, manifest.tokenizer["pad"], dtype=manifest.token_dtype)
        segments = np.full(shape, -1, dtype=np.int32)
        positions = np.zeros(shape, dtype=np.int32)
        mask = np.zeros(shape, dtype=np.uint8)
        lengths = np.zeros(count, dtype=np.int32)
        reference = None if self.column is None else np.empty((count, parts), dtype=np.float32)
        desirable = np.zeros(count, dtype=bool) if unpaired else None
        margins = np.zeros(count, dtype=np.float32) if manifest.margins else None
        steps = np.full(shape, -1, dtype=np.int8) if manifest.step_labels else None
        for slot, (index, row) in enumerate(zip(shards.tolist(), rows.tolist())):
            shard = self.shard(index)
            chosen = list(range(parts))
            if desirable is not None:
                answer = shard.answer(row)
                desirable[slot] = answer == 0
                chosen = [answer, WITH_MISMATCHED - 1][:parts]
            for part, of_row in enumerate(chosen):
                sequence = shard.sequence(row, of_row)[:length]
                size = len(sequence)
                tokens[slot, part, :size] = sequence
                segments[slot, part, :size] = part
                positions[slot, part, :size] = np.arange(size)
                mask[slot, part, shard.prompts[row]:size] = 1
                lengths[slot] += size
            if margins is not None and shard.margins is not None:
                margins[slot] = shard.margins[row]
            if steps is not None and shard.steps is not None:
                labels, bounds = shard.steps
                steps[slot, 0, shard.prompts[row]:shard.prompts[row] + bounds[row + 1] - bounds[row]] = \
                    labels[bounds[row]:bounds[row + 1]]
            if reference is not None and self.column is not None:
                reference[slot] = self.column.values(index)[row, :parts]
            if int(tokens[slot].max()) >= manifest.vocabulary_size:
                raise self._damaged(index, f"a token is outside the vocabulary of {manifest.vocabulary_size}")
        ids = [f"{manifest.shards[shard].name}:{row}" for shard, row in zip(shards.tolist(), rows.tolist())]
        flat = (count, parts * length)
        return Rows(tokens.reshape(flat), lengths, segments.reshape(flat), positions.reshape(flat), ids,
                    mask.reshape(flat), parts, reference, margins=margins, desirable=desirable,
                    step_labels=None if steps is None else steps.reshape(flat))


def open_set(uri: str, cache: Path | None = None, *, verify: bool = False, on_damage: OnDamage | None = None,
             manifest: Manifest | None = None, parts: int = PARTS, reference: str = "",
             teacher: str = "") -> ShardSet | PairSet | RolloutSet:
    """Open a set of any kind.

    Args:
        uri: the set.
        cache: see `OpenedSet.open`, also for the next two.
        verify: hash files in place too.
        on_damage: is told of shards that were read again.
        manifest: the set's manifest, if it is already known.
        parts: of a preference set, the sequences in each row.
        reference: of a preference set, folder of the log-probabilities under a reference model; "": they are not read.
        teacher: of packed sequences, folder of a teacher's tokens; "": they are not read.

    Raises:
        ShardError: there is no set, or no log-probabilities of it in `reference`, or no tokens of it in `teacher`.
    """
    manifest = read_manifest(storage.store(uri)) if manifest is None else manifest
    if manifest.kind == ROLLOUTS:
        return RolloutSet.open(uri, cache, verify=verify, on_damage=on_damage, manifest=manifest)
    if manifest.kind != PREFERENCES:
        packed = ShardSet.open(uri, cache, verify=verify, on_damage=on_damage, manifest=manifest)
        return packed.reading(TeacherTokens.of(teacher, uri, manifest, cache, verify=verify, on_damage=on_damage)
                              if teacher else None)
    column = Column.open(reference, uri, manifest, parts - manifest.unpaired) if reference else None
    opened = PairSet.open(uri, cache, verify=verify, on_damage=on_damage, manifest=manifest)
    return opened.reading(parts, column)


def check_answers(uri: str, manifest: Manifest) -> set[int]:
    """Open every shard of a preference set, and so find pairs whose two answers are equal.

    Returns:
        The tokens that labelled steps end with, without the last ones of their answers.

    Raises:
        ShardError: a shard is damaged, or has such a pair.
    """
    opened = PairSet.open(uri, manifest=manifest)
    ends: set[int] = set()
    for index in range(len(manifest.shards)):
        shard = opened.shard(index)
        if shard.steps is not None:
            ends |= _step_ends(shard, *shard.steps)
    opened.close()
    return ends


def _step_ends(shard: PairShard, labels: np.ndarray, bounds: np.ndarray) -> set[int]:
    tokens, starts = shard.chosen
    sizes = np.diff(bounds)
    places = np.arange(bounds[0], bounds[-1]) + np.repeat(starts[:-1] + shard.prompts - bounds[:-1], sizes)
    is_last = np.zeros(len(places), dtype=bool)
    is_last[bounds[1:] - 1 - bounds[0]] = True
    chosen = (labels[bounds[0]:bounds[-1]] >= 0) & ~is_last
    return set(np.unique(tokens[places[chosen]]).tolist())


def _flat(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    return column.values.to_numpy(), column.offsets.to_numpy()
