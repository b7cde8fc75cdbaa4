"""MinHash signatures of word or character n-grams, and the band hashes that find candidate pairs.

A shingle is `ngram` consecutive words or characters (code points) of the normalised text (`text`), in which numbers are
"0". Shingles that contain only numbers are left out, or tables of different numbers would match. Signatures are
bit-identical to datasketch 2.0 `MinHash(scheme="affine32", seed=seed)` updated with the same 32-bit shingle hashes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numba
import numpy as np

from tidewheel.data import text
from tidewheel.data.text.kernel_tools import compiled
from tidewheel.versions import Version

VERSION = Version("minhash", uses=(text.VERSION,))
MINHASH_VERSION = f"{text.TEXT_VERSION}/affine32-1"
MAX_WORDS = 100_000  # longer texts saturate a signature and match unrelated ones (Marin caps at 500,000 characters)
MAX_CHARACTERS = 500_000
Unit = Literal["words", "characters"]
_POLYNOMIAL = np.uint64(0xD6E8FEB86659FD93)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_NO_NUMBER = np.uint64(0)  # no character has this hash


@dataclass(frozen=True)
class MinHashResult:
    """MinHash signatures of n documents.

    Args:
        signatures: uint32 [n, k]. The bits of a document without shingles are all ones; leave it out of the banding
            and compare it exactly.
        shingles: number of shingles of each document, int32 [n]; 0 if it is too short or contains only numbers.
    """

    signatures: np.ndarray
    shingles: np.ndarray


def minhash(texts: text.Texts, *, ngram: int = 5, num_permutations: int = 112, seed: int = 1, unit: Unit = "words"
            ) -> MinHashResult:
    """Return the signatures of documents, from their first `MAX_WORDS` words or `MAX_CHARACTERS` characters.

    Args:
        texts: the documents.
        ngram: words or characters per shingle.
        num_permutations: values per signature.
        seed: seed of the permutations.
        unit: "words" or "characters".

    Raises:
        ValueError: `ngram` or `num_permutations` is below 1.
    """
    if ngram < 1 or num_permutations < 1:
        raise ValueError(f"ngram and num_permutations must be at least 1, got {ngram} and {num_permutations}")
    a, b = permutations(num_permutations, seed)
    count = len(texts)
    signatures = np.full((count, num_permutations), 0xFFFFFFFF, np.uint32)
    shingles = np.zeros(count, np.int32)
    for first, last, hashes, offsets, most, number in _units(texts, unit):
        _signatures(hashes, offsets, ngram, most, number, a, b, signatures[first:last], shingles[first:last])
    return MinHashResult(signatures, shingles)


def sign(words: np.ndarray, offsets: np.ndarray, ngram: int, coefficients: tuple[np.ndarray, np.ndarray],
         signatures: np.ndarray, shingles: np.ndarray) -> None:
    """Compute signatures from word hashes (`text.Words`), in place.

    Args:
        words: uint64 [w].
        offsets: document d has the words [offsets[d], offsets[d + 1]), int64 [n + 1].
        ngram: words per shingle.
        coefficients: (a, b) from `permutations`.
        signatures: uint32 [n, k], all bits ones; overwritten.
        shingles: int32 [n], zeros; overwritten with the number of shingles of each document.
    """
    _signatures(words, offsets, ngram, MAX_WORDS, _number_word(), *coefficients, signatures, shingles)


def shingle_hashes(texts: text.Texts, *, ngram: int = 5, unit: Unit = "words") -> list[np.ndarray]:
    """Return the 32-bit hashes that `minhash` permutes, a uint32 array for each document, in text order.

    Args:
        texts: the documents.
        ngram: words or characters per shingle.
        unit: "words" or "characters".
    """
    arrays = []
    for _, _, hashes, offsets, most, number in _units(texts, unit):
        for start, end in itertools.pairwise(offsets.tolist()):
            out = np.zeros(max(min(end - start, most) - ngram + 1, 0), np.uint32)
            arrays.append(out[: _shingles(hashes[start:end], ngram, number, out)])
    return arrays


def shingle_sets(texts: text.Texts, *, ngram: int = 5, unit: Unit = "words") -> list[np.ndarray]:
    """Return the distinct `shingle_hashes` of each document in ascending order.

    Among 10^5 shingles, about one pair has equal 32-bit hashes by chance, so Jaccard similarities of these sets are
    exact to about 10^-5.

    Args:
        texts: the documents.
        ngram: words or characters per shingle.
        unit: "words" or "characters".
    """
    return [np.unique(hashes) for hashes in shingle_hashes(texts, ngram=ngram, unit=unit)]


def exact_jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Return intersection over union of two `shingle_sets`; 0 if both are empty."""
    common = int(_common(text.frozen(a), text.frozen(b)))
    union = len(a) + len(b) - common
    return common / union if union else 0.0


def _units(texts: text.Texts, unit: Unit) -> Iterator[tuple[int, int, np.ndarray, np.ndarray, int, np.uint64]]:
    """Yield (first, last, hashes of words or characters, offsets, maximum per document, hash of a number) by chunk."""
    if unit == "words":
        for first, last, words in text.scan(texts):
            yield first, last, words.hashes, words.offsets, MAX_WORDS, _number_word()
        return
    for first, last, data, bounds in text.normalised_chunks(texts):
        codes = np.empty(int(bounds[-1]), np.uint64)
        offsets = np.zeros(len(bounds), np.int64)
        _characters(text.frozen(data), text.frozen(bounds), codes, offsets)
        yield first, last, codes[: offsets[-1]], offsets, MAX_CHARACTERS, _NO_NUMBER


@lru_cache(maxsize=1)
def _number_word() -> np.uint64:
    """Return the hash of the word "0", which stands for every number."""
    return np.uint64(text.words(["0"]).hashes[0])


def permutations(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (a, b), uint32 [count], of h -> a h + b mod 2^32, drawn as datasketch 2.0 draws them for affine32."""
    generator = np.random.RandomState(seed)
    a = generator.randint(0, 1 << 31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    b = generator.randint(0, 1 << 32, count, dtype=np.uint32)
    return a, b


def band_hashes(signatures: np.ndarray, *, bands: int = 14, rows: int = 8) -> np.ndarray:
    """Return a hash of each band of `rows` signature values, uint64 [n, bands].

    Args:
        signatures: uint32 [n, k].
        bands: number of bands.
        rows: signature values per band.

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
    """Return the share of equal values of pairs of signatures [m, k], float64 [m].

    The standard error for a Jaccard similarity s is sqrt(s(1-s)/k).
    """
    return np.asarray(np.mean(a == b, axis=1, dtype=np.float64))


def text_signatures(hashes: np.ndarray, num_permutations: int) -> np.ndarray:
    """Return substitute signatures, uint32 [n, k], for documents without shingles.

    Each one repeats the text hash, so equal texts agree in all values.

    Args:
        hashes: `hashing.text_hashes`, uint64 [n, 2].
        num_permutations: values per signature, k.
    """
    halves = np.ascontiguousarray(hashes[:, ::-1].astype("<u8")).view("<u4")
    return np.tile(halves, (1, -(-num_permutations // 4)))[:, :num_permutations].astype(np.uint32)


@numba.njit(nogil=True)
def _window(words, i, ngram):
    """Return the 64-bit hash of words [i, i + ngram), finalised by murmur's mixer."""
    h = np.uint64(0)
    for j in range(ngram):
        h = h * _POLYNOMIAL + words[i + j]
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return h ^ (h >> np.uint64(33))


@compiled
def _shingles(words, ngram, number, out):
    count = numbers = 0
    for i in range(min(len(words), len(out) + ngram - 1)):
        numbers = numbers + 1 if words[i] == number else 0
        if i + 1 >= ngram and numbers < ngram:
            out[count] = np.uint32(_window(words, i + 1 - ngram, ngram) >> np.uint64(32))
            count += 1
    return count


@compiled
def _signatures(words, offsets, ngram, max_words, number, a, b, signatures, shingles):
    longest, power = np.int64(0), np.uint64(1)
    for document in range(len(offsets) - 1):
        longest = max(longest, min(offsets[document + 1] - offsets[document], max_words))
    for _ in range(ngram):
        power *= _POLYNOMIAL
    hashes = np.empty(longest + 4, np.uint32)
    for document in range(len(offsets) - 1):
        start = offsets[document]
        end = min(offsets[document + 1], start + max_words)
        window = np.uint64(0)
        count = numbers = 0  # number of shingles; number of consecutive numbers up to this word
        for i in range(start, end):
            numbers = numbers + 1 if words[i] == number else 0
            window = window * _POLYNOMIAL + words[i]
            if i - start >= ngram:
                window -= words[i - ngram] * power
            # `_window`, then murmur3's 32-bit finaliser; every step is wrapped, as numba widens uint32 to 64 bits
            mixed = (window ^ (window >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
            h = np.uint32((mixed ^ (mixed >> np.uint64(33))) >> np.uint64(32))
            h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
            h = np.uint32(np.uint32(h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
            hashes[count] = np.uint32(h ^ (h >> np.uint32(16)))
            count += i + 1 - start >= ngram and numbers < ngram
        shingles[document] += count
        if count == 0:
            continue
        hashes[count : count + 4] = hashes[count - 1]
        signature = signatures[document]
        for i in range(0, count, 4):  # four at a time: a, b and the signature are loaded a quarter as often
            h0, h1, h2, h3 = hashes[i], hashes[i + 1], hashes[i + 2], hashes[i + 3]
            for k in range(len(a)):
                ak, bk = a[k], b[k]
                low = min(np.uint32(np.uint32(ak * h0) + bk), np.uint32(np.uint32(ak * h1) + bk))
                high = min(np.uint32(np.uint32(ak * h2) + bk), np.uint32(np.uint32(ak * h3) + bk))
                signature[k] = min(signature[k], min(low, high))


@compiled
def _characters(data, bounds, codes, offsets):
    """Compute a 64-bit hash of each code point of UTF-8 documents data[bounds[i]:bounds[i+1]]; never 0."""
    count = 0
    for document in range(len(bounds) - 1):
        i, end = bounds[document], bounds[document + 1]
        while i < end:
            code = np.uint64(data[i])
            i += 1
            while i < end and data[i] & 0xC0 == 0x80:
                code = code << np.uint64(8) | np.uint64(data[i])
                i += 1
            codes[count] = (code + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # odd factor: one to one
            count += 1
        offsets[document + 1] = count


@compiled
def _common(a, b):
    """Return the number of values that are in both of two ascending arrays of distinct values."""
    i = j = common = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            common += 1
            i += 1
            j += 1
        elif a[i] < b[j]:
            i += 1
        else:
            j += 1
    return common
