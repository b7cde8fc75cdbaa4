"""Unigram and bigram statistics of packed rows: what a language model must at least beat.

Counted on a bounded, deterministic share of the rows, so that the figures stay cheap at any size. A bigram is two
tokens next to each other in one segment. Codes are previous x vocabulary + next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

MAX_TOKENS = 1 << 25  # counted of a split, over all partitions
UNIT_TOKENS = 1 << 21  # and of one partition: counting takes some 40 bytes a token
MERGED = 1 << 21  # pairs of units that are added up at a time


def share(partitions: int) -> int:
    """Places that each of so many partitions counts."""
    return max(min(MAX_TOKENS // partitions, UNIT_TOKENS), 1)
COUNTS_SCHEMA = pa.schema([("code", pa.int64()), ("count", pa.int64())])


@dataclass(frozen=True)
class Counts:
    """unigrams: int64 [vocabulary]; codes, counts: int64 [b], the bigrams seen, codes increasing."""

    unigrams: np.ndarray
    codes: np.ndarray
    counts: np.ndarray


def count(tables: Sequence[pa.Table], vocabulary: int, max_tokens: int) -> Counts:
    """Counts of the first rows of `tables` (of `shards.format.shard_schema`) that together hold `max_tokens` places."""
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
    """(tokens int64 [n, L], real tokens bool [n, L], places [n, L-1] whose two tokens are in one segment)."""
    tokens = table["tokens"].chunk(0).flatten().to_numpy().reshape(-1, width).astype(np.int64)
    real = np.arange(width) < table["length"].to_numpy()[:, None]
    starts = table["segment_starts"].chunk(0)
    rows = np.repeat(np.arange(len(table)), starts.value_lengths().to_numpy())
    first = np.zeros(tokens.shape, bool)
    first[rows, starts.flatten().to_numpy()] = True
    return tokens, real, real[:, 1:] & ~first[:, 1:]


def to_tables(counts: Counts) -> tuple[pa.Table, pa.Table]:
    """(unigrams that occur, bigrams), each of `COUNTS_SCHEMA`."""
    used = np.flatnonzero(counts.unigrams)
    return (pa.table([pa.array(used), pa.array(counts.unigrams[used])], schema=COUNTS_SCHEMA),
            pa.table([pa.array(counts.codes), pa.array(counts.counts)], schema=COUNTS_SCHEMA))


def merge(unigrams: Iterable[pa.Table], bigrams: Iterable[pa.Table], vocabulary: int) -> Counts:
    """The sum of what `to_tables` gave for several units, which may come one by one: memory is that of `MERGED` pairs
    and of the distinct ones."""
    total = np.zeros(vocabulary, np.int64)
    for table in unigrams:
        np.add.at(total, table["code"].to_numpy(), table["count"].to_numpy())
    found, waiting, size = (np.zeros(0, np.int64), np.zeros(0, np.int64)), list[tuple[np.ndarray, np.ndarray]](), 0
    for table in bigrams:
        waiting.append((table["code"].to_numpy(), table["count"].to_numpy()))
        size += len(table)
        if size > MERGED:
            found, waiting, size = _sums([found, *waiting]), [], 0
    return Counts(total, *_sums([found, *waiting]))


def _sums(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct codes, increasing, and the sum of each one's counts."""
    codes = np.concatenate([codes for codes, _ in parts])
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    first = np.flatnonzero(np.diff(codes, prepend=-1))
    if not len(first):
        return codes, codes
    return codes[first], np.add.reduceat(np.concatenate([counts for _, counts in parts])[order], first)


def entropies(validation: Counts, training: Counts) -> dict[str, Any]:
    """Nats a token on the validation split.

    unigram: H(X); bigram: H(X_t | X_t-1), both of the split itself, so lower bounds for models that know as much of
    the past only. unigram_model: counts of the training split with one added to each; bigram_model: the training
    split's bigrams, interpolated with that by Witten-Bell (weight of the bigram c(y) / (c(y) + kinds after y)).
    None where the split has no such token.
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
