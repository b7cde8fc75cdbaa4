"""Unigram and bigram statistics of packed rows: losses that a language model must beat.

They are counted on a bounded, deterministic share of the rows, so that they stay cheap at any size. A bigram is two
adjacent tokens of one segment; its code is previous x vocabulary + next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

MAX_TOKENS = 1 << 25
"""Tokens counted in a split, over all partitions."""
UNIT_TOKENS = 1 << 21
"""Maximum number of tokens counted in one partition: counting takes about 40 bytes for each token."""
MERGED = 1 << 21
"""Bigrams of units that are added up at a time."""
COUNTS_SCHEMA = pa.schema([("code", pa.int64()), ("count", pa.int64())])


def share(partitions: int) -> int:
    """Return the number of tokens that each partition counts."""
    return max(min(MAX_TOKENS // partitions, UNIT_TOKENS), 1)


@dataclass(frozen=True)
class Counts:
    """Counts of unigrams and bigrams.

    Args:
        unigrams: count of each token, int64 [vocabulary].
        codes: codes of the bigrams that occur, increasing, int64 [b].
        counts: count of each of these bigrams, int64 [b].
    """

    unigrams: np.ndarray
    codes: np.ndarray
    counts: np.ndarray


def count(tables: Sequence[pa.Table], vocabulary: int, max_tokens: int) -> Counts:
    """Count the first rows of tables.

    Args:
        tables: packed rows (`shards.format.shard_schema`).
        vocabulary: number of tokens of the vocabulary.
        max_tokens: maximum number of tokens, including padding, of the rows that are counted.
    """
    unigrams = np.zeros(vocabulary, np.int64)
    parts = []
    room = max_tokens
    for table in tables:
        width = table.schema.field("tokens").type.list_size
        piece = table.slice(0, -(-max(room, 0) // width)).combine_chunks()
        if not len(piece):
            continue
        room -= len(piece) * width
        tokens, real, joined = _masks(piece, width)
        unigrams += np.bincount(tokens[real], minlength=vocabulary)
        parts.append((tokens[:, :-1] * vocabulary + tokens[:, 1:])[joined])
    codes, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *parts]), return_counts=True)
    return Counts(unigrams, codes, counts.astype(np.int64))


def _masks(table: pa.Table, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens int64 [n, L], non-padding mask [n, L], mask [n, L-1] of adjacent tokens in one segment)."""
    tokens = table["tokens"].chunk(0).flatten().to_numpy().reshape(-1, width).astype(np.int64)
    real = np.arange(width) < table["length"].to_numpy()[:, None]
    starts = table["segment_starts"].chunk(0)
    rows = np.repeat(np.arange(len(table)), starts.value_lengths().to_numpy())
    first = np.zeros(tokens.shape, bool)
    first[rows, starts.flatten().to_numpy()] = True
    return tokens, real, real[:, 1:] & ~first[:, 1:]


def to_tables(counts: Counts) -> tuple[pa.Table, pa.Table]:
    """Return (unigrams that occur, bigrams), each as `COUNTS_SCHEMA`."""
    used = np.flatnonzero(counts.unigrams)
    return (pa.table([pa.array(used), pa.array(counts.unigrams[used])], schema=COUNTS_SCHEMA),
            pa.table([pa.array(counts.codes), pa.array(counts.counts)], schema=COUNTS_SCHEMA))


def merge(unigrams: Iterable[pa.Table], bigrams: Iterable[pa.Table], vocabulary: int) -> Counts:
    """Add up the tables of several units.

    The tables may come one by one: memory is that of `MERGED` bigrams and of the distinct ones.

    Args:
        unigrams: unigram tables of `to_tables`.
        bigrams: bigram tables of `to_tables`.
        vocabulary: number of tokens of the vocabulary.
    """
    total = np.zeros(vocabulary, np.int64)
    for table in unigrams:
        np.add.at(total, table["code"].to_numpy(), table["count"].to_numpy())
    merged = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    waiting: list[tuple[np.ndarray, np.ndarray]] = []
    size = 0
    for table in bigrams:
        waiting.append((table["code"].to_numpy(), table["count"].to_numpy()))
        size += len(table)
        if size > MERGED:
            merged = _sums([merged, *waiting])
            waiting = []
            size = 0
    return Counts(total, *_sums([merged, *waiting]))


def _sums(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct codes, increasing, and the sum of the counts of each."""
    codes = np.concatenate([codes for codes, _ in parts])
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    first = np.flatnonzero(np.diff(codes, prepend=-1))
    if not len(first):
        return codes, codes
    return codes[first], np.add.reduceat(np.concatenate([counts for _, counts in parts])[order], first)


def entropies(validation: Counts, training: Counts) -> dict[str, Any]:
    """Return losses on the validation split, in nats per token; None if the split has no such token.

    `unigram` is H(X) and `bigram` is H(X_t | X_t-1) of the split itself: lower bounds for models that see no more of
    the past. `unigram_model` uses the counts of the training split with one added to each. `bigram_model` interpolates
    the training split's bigrams with it by Witten-Bell (weight of the bigram c(y) / (c(y) + kinds after y)).
    """
    vocabulary = len(validation.unigrams)
    smoothed = (training.unigrams + 1) / (training.unigrams.sum() + vocabulary)
    previous, following = np.divmod(validation.codes, vocabulary)
    contexts = np.bincount(previous, weights=validation.counts, minlength=vocabulary)
    known = np.searchsorted(training.codes, validation.codes)
    known = np.minimum(known, max(len(training.codes) - 1, 0))
    seen = np.zeros(len(validation.codes))
    if len(training.codes):
        seen = np.where(training.codes[known] == validation.codes, training.counts[known], 0)
    context = np.bincount(training.codes // vocabulary, weights=training.counts, minlength=vocabulary)[previous]
    kinds = np.bincount(training.codes // vocabulary, minlength=vocabulary)[previous]
    blended = (seen + kinds * smoothed[following]) / np.maximum(context + kinds, 1)
    model = np.where(context > 0, blended, smoothed[following])
    share = validation.unigrams / max(validation.unigrams.sum(), 1)
    return {
        "unigram": _mean_loss(share, validation.unigrams),
        "bigram": _mean_loss(validation.counts / np.maximum(contexts[previous], 1), validation.counts),
        "unigram_model": _mean_loss(smoothed, validation.unigrams),
        "bigram_model": _mean_loss(model, validation.counts),
        "validation_tokens": int(validation.unigrams.sum()), "training_tokens": int(training.unigrams.sum()),
    }


def _mean_loss(probabilities: np.ndarray, counts: np.ndarray) -> float | None:
    total = counts.sum()
    if not total:
        return None
    used = counts > 0
    return round(float(-(counts[used] * np.log(probabilities[used])).sum() / total), 9)
