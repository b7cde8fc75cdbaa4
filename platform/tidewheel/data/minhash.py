"""MinHash signatures of word n-grams, and the banding that finds candidate pairs.

A shingle is `ngram` consecutive words of the normalised text (`text`), in which numbers are "0". One of numbers
only is left out: tables of different numbers would be copies of each other. Signatures are bit-identical to
datasketch 2.0 `MinHash(scheme="affine32", seed=seed)` updated with the same 32-bit shingle hashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numba
import numpy as np

from tidewheel.data import text

MINHASH_VERSION = f"{text.TEXT_VERSION}/affine32-1"
MAX_WORDS = 100_000  # longer texts saturate a signature and glue strangers together (Marin caps at 500,000 characters)
_POLYNOMIAL = np.uint64(0xD6E8FEB86659FD93)
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class MinHashResult:
    """signatures [n, k] uint32; shingles [n] int32, 0 when the text has none (too short, or numbers only).

    A signature of a document without shingles is all ones: leave it out of the banding, such a
    document is compared exactly only.
    """

    signatures: np.ndarray
    shingles: np.ndarray


def minhash(texts: text.Texts, *, ngram: int = 5, num_permutations: int = 112, seed: int = 1) -> MinHashResult:
    """Signatures of the documents' first `MAX_WORDS` words.

    Raises:
        ValueError: ngram or num_permutations below 1.
    """
    if ngram < 1 or num_permutations < 1:
        raise ValueError(f"ngram and num_permutations must be at least 1, got {ngram} and {num_permutations}")
    a, b = permutations(num_permutations, seed)
    number, count = _number_word(), len(texts)
    signatures = np.full((count, num_permutations), 0xFFFFFFFF, np.uint32)
    shingles = np.zeros(count, np.int32)
    for first, last, words in text.scan(texts):
        _signatures(words.hashes, words.offsets, ngram, MAX_WORDS, number, a, b,
                    signatures[first:last], shingles[first:last])
    return MinHashResult(signatures, shingles)


def shingle_hashes(texts: text.Texts, *, ngram: int = 5) -> list[np.ndarray]:
    """The 32-bit hashes that `minhash` permutes, one uint32 array a document, in text order."""
    found = []
    for _, _, words in text.scan(texts):
        for start, end in zip(words.offsets[:-1], words.offsets[1:], strict=True):
            hashes = np.zeros(max(min(end - start, MAX_WORDS) - ngram + 1, 0), np.uint32)
            found.append(hashes[: _shingles(words.hashes[start:end], ngram, _number_word(), hashes)])
    return found


@lru_cache(maxsize=1)
def _number_word() -> np.uint64:
    """Hash of the word "0", which every number is."""
    return np.uint64(text.words(["0"]).hashes[0])


def permutations(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(a, b) uint32 [count] of h -> a h + b mod 2^32, drawn as datasketch 2.0 draws them for affine32."""
    generator = np.random.RandomState(seed)
    a = generator.randint(0, 1 << 31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    b = generator.randint(0, 1 << 32, count, dtype=np.uint32)
    return a, b


def band_hashes(signatures: np.ndarray, *, bands: int = 14, rows: int = 8) -> np.ndarray:
    """[n, bands] uint64: one hash for each band of `rows` signature values; equal bands, equal hashes.

    Raises:
        ValueError: the signatures have fewer than bands x rows values.
    """
    if signatures.shape[1] < bands * rows:
        raise ValueError(f"{bands} bands of {rows} need {bands * rows} permutations, got {signatures.shape[1]}")
    values = signatures[:, : bands * rows].reshape(len(signatures), bands, rows).astype(np.uint64)
    hashes = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64) * _MIX, values.shape[:2]).copy()
    for row in range(rows):
        hashes = (hashes ^ values[:, :, row]) * _MIX
        hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xC4CEB9FE1A85EC53)
    return hashes ^ (hashes >> np.uint64(32))


def estimated_jaccard(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[m, k] x [m, k] -> [m] float64: share of equal signature values; its standard error is sqrt(s(1-s)/k)."""
    return np.asarray(np.mean(a == b, axis=1, dtype=np.float64))


def collision_probability(s: np.ndarray | float, bands: int, rows: int) -> np.ndarray:
    """P(at least one equal band) for Jaccard `s`: 1 - (1 - s^rows)^bands."""
    return np.asarray(1.0 - (1.0 - np.asarray(s, np.float64) ** rows) ** bands)


@numba.njit(nogil=True)
def _window(words, i, ngram):
    """64-bit hash of words [i, i + ngram), finalised by murmur's mixer."""
    h = np.uint64(0)
    for j in range(ngram):
        h = h * _POLYNOMIAL + words[i + j]
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return h ^ (h >> np.uint64(33))


@numba.njit(nogil=True, cache=True)
def _shingles(words, ngram, number, out):
    count = numbers = 0
    for i in range(min(len(words), len(out) + ngram - 1)):
        numbers = numbers + 1 if words[i] == number else 0
        if i + 1 >= ngram and numbers < ngram:
            out[count] = np.uint32(_window(words, i + 1 - ngram, ngram) >> np.uint64(32))
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def _signatures(words, offsets, ngram, max_words, number, a, b, signatures, shingles):
    permutation_count = len(a)
    for document in range(len(offsets) - 1):
        start = offsets[document]
        end = min(offsets[document + 1], start + max_words)
        signature = signatures[document]
        numbers = 0  # in a row up to here
        for i in range(start, end):
            numbers = numbers + 1 if words[i] == number else 0
            if i + 1 - start < ngram or numbers >= ngram:
                continue
            shingles[document] += 1
            h = np.uint32(_window(words, i + 1 - ngram, ngram) >> np.uint64(32))
            # murmur3's 32-bit finaliser; every step is wrapped, as numba widens uint32 arithmetic to 64 bits
            h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
            h = np.uint32(np.uint32(h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
            h = np.uint32(h ^ (h >> np.uint32(16)))
            for k in range(permutation_count):
                value = np.uint32(np.uint32(a[k] * h) + b[k])
                signature[k] = min(signature[k], value)
