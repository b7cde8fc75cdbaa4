"""128-bit hashes of documents for exact deduplication."""

from __future__ import annotations

import itertools

import numpy as np
import xxhash

from tidewheel.data import text

HASH_VERSION = f"{text.TEXT_VERSION}+digits/xxh3-128"
_NO_WORDS_SEED = 1
"""Separates raw hashes of documents without words from hashes of normalised texts."""


def text_hashes(texts: text.Texts) -> np.ndarray:
    """Return XXH3-128 of each document's normalised text, uint64 [n, 2] (high, low).

    Case, diacritics, punctuation and spacing are ignored. Unlike in MinHash shingles, digits count (`keep_digits`):
    "Chapter 12" is not a copy of "Chapter 13". A document without words ("!!!") is hashed by its raw bytes.
    """
    data, offsets = text.buffers(texts)
    hashes = np.empty((len(offsets) - 1, 2), np.uint64)
    for first, last, normalised, bounds in text.normalised_chunks(texts, keep_digits=True):
        hashes[first:last] = of_normalised(normalised, bounds, data, offsets[first:])
    return hashes


def of_normalised(normalised: np.ndarray, bounds: np.ndarray, data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the hashes of n documents from their normalised texts, uint64 [n, 2].

    Args:
        normalised: bytes of the normalised texts.
        bounds: text i is normalised[bounds[i] : bounds[i + 1]], int64 [n + 1].
        data: bytes of the raw texts.
        offsets: raw text i is data[offsets[i] : offsets[i + 1]], int64 [n + 1 or more].
    """
    view = normalised.data
    digests = [xxhash.xxh3_128_digest(view[start:end]) for start, end in itertools.pairwise(bounds.tolist())]
    hashes = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)
    for i in np.nonzero(np.diff(bounds) == 0)[0]:
        raw = xxhash.xxh3_128_digest(data.data[offsets[i] : offsets[i + 1]], seed=_NO_WORDS_SEED)
        hashes[i] = np.frombuffer(raw, ">u8")
    return hashes
