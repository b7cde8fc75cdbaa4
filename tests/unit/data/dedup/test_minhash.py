"""Tests of signatures against datasketch, of estimates against exact Jaccard, and of banding against its formula."""

import numpy as np
import pytest
from datasketch import MinHash
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.data import text
from tidewheel.data.dedup import minhash as mh
from tidewheel.data.dedup.banding import collision_probability
from tidewheel.data.text import hashing

WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "dddd", "12", "été", "中", "naive,", "x.", "a-b", "Σ"]),
                 max_size=40)
TEXTS = st.lists(WORDS.map(" ".join), min_size=1, max_size=5)


def datasketch_signature(hashes: np.ndarray, count: int, seed: int) -> np.ndarray:
    sketch = MinHash(num_perm=count, seed=seed, scheme="affine32", hashfunc=int)
    for value in hashes.tolist():
        sketch.update(value)
    return sketch.hashvalues


def slow_shingles(words: np.ndarray, ngram: int) -> list[int]:
    """Return the 32-bit hash of each window of 64-bit word hashes, computed with Python integers."""
    shingles = []
    mask = (1 << 64) - 1
    number = int(text.words(["7"]).hashes[0])
    for i in range(len(words) - ngram + 1):
        h = 0
        for word in words[i : i + ngram].tolist():
            h = (h * 0xD6E8FEB86659FD93 + word) & mask
        h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD & mask
        if any(word != number for word in words[i : i + ngram].tolist()):
            shingles.append((h ^ (h >> 33)) >> 32)
    return shingles


@given(TEXTS, st.integers(1, 7), st.sampled_from([1, 16, 112]), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_signatures_are_bit_identical_to_datasketch_affine32(texts: list[str], ngram: int, count: int, seed: int):
    result = mh.minhash(texts, ngram=ngram, num_permutations=count, seed=seed)
    words = text.words(texts)
    for number, hashes in enumerate(mh.shingle_hashes(texts, ngram=ngram)):
        own = words.hashes[words.offsets[number] : words.offsets[number + 1]]
        assert hashes.tolist() == slow_shingles(own, ngram)
        assert result.shingles[number] == len(hashes)
        np.testing.assert_array_equal(result.signatures[number], datasketch_signature(hashes, count, seed))


def slow_character_shingles(normalised: str, ngram: int) -> list[int]:
    shingles = []
    mask = (1 << 64) - 1
    codes = [((int.from_bytes(letter.encode()) + 1) * 0x9E3779B97F4A7C15) & mask for letter in normalised]
    for i in range(len(codes) - ngram + 1):
        h = 0
        for code in codes[i : i + ngram]:
            h = (h * 0xD6E8FEB86659FD93 + code) & mask
        h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD & mask
        shingles.append((h ^ (h >> 33)) >> 32)
    return shingles


@given(TEXTS, st.integers(1, 30), st.sampled_from([1, 16]), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_character_shingles_are_ngrams_of_the_normalised_text(texts: list[str], ngram: int, count: int, seed: int):
    result = mh.minhash(texts, ngram=ngram, num_permutations=count, seed=seed, unit="characters")
    sets = mh.shingle_sets(texts, ngram=ngram, unit="characters")
    for number, hashes in enumerate(mh.shingle_hashes(texts, ngram=ngram, unit="characters")):
        expected = slow_character_shingles(text.normalise(texts)[number].as_py(), ngram)
        assert hashes.tolist() == expected
        assert sets[number].tolist() == sorted(set(expected))
        assert result.shingles[number] == len(hashes)
        np.testing.assert_array_equal(result.signatures[number], datasketch_signature(hashes, count, seed))


@given(*[st.sets(st.integers(0, 2**32 - 1) | st.integers(0, 9))] * 2)
def test_exact_jaccard_equals_that_of_sets(a: set[int], b: set[int]):
    arrays = [np.array(sorted(values), np.uint32) for values in (a, b)]
    assert mh.exact_jaccard(*arrays) == (len(a & b) / len(a | b) if a | b else 0.0)


def test_documents_without_shingles_are_compared_by_their_text():
    texts = ["Too short", "too  SHORT!", "too late", "1 2 3 4 5", "1 2 3 4 6"]
    assert mh.minhash(texts).shingles.tolist() == [0] * 5
    for count in (1, 4, 7, 112):
        result = mh.text_signatures(hashing.text_hashes(texts), count)
        assert result.shape == (5, count)
        assert (result[:1] == result).all(axis=1).tolist() == [True, True, False, False, False]
        assert mh.estimated_jaccard(result[3:4], result[4:])[0] < 0.5


def test_documents_that_are_short_or_only_numbers_have_no_shingles():
    result = mh.minhash(["too short", "", "just long enough for it", "中文字五个", "1,2,3.4,5,6,7,8", "1 2 3 4 five 6"])
    assert result.signatures.dtype == np.uint32
    assert result.signatures.shape == (6, 112)
    assert result.shingles.tolist() == [0, 0, 1, 1, 0, 2]  # shingles that contain only numbers are left out
    assert np.all(result.signatures[:2] == 0xFFFFFFFF)


def test_only_the_first_words_of_a_very_long_document_count(monkeypatch):
    monkeypatch.setattr(mh, "MAX_WORDS", 50)
    long = " ".join(f"w{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(300))
    start = " ".join(long.split()[:50])
    result = mh.minhash([long, start])
    assert result.shingles.tolist() == [46, 46]
    np.testing.assert_array_equal(result.signatures[0], result.signatures[1])


def test_estimate_is_close_to_exact_jaccard():
    generator = np.random.default_rng(0)
    vocabulary = np.array(["".join(letters) for letters in generator.choice(list("abcdefghij"), (400, 5))])
    errors = []
    for _ in range(60):
        base = generator.choice(vocabulary, 300)
        other = base.copy()
        changed = generator.choice(300, generator.integers(1, 40), replace=False)
        other[changed] = generator.choice(vocabulary, len(changed))
        a, b = ({tuple(words[i : i + 5]) for i in range(296)} for words in (base, other))
        result = mh.minhash([" ".join(base), " ".join(other)])
        errors.append(mh.estimated_jaccard(result.signatures[:1], result.signatures[1:])[0] - len(a & b) / len(a | b))
    assert abs(np.mean(errors)) < 0.02
    assert np.max(np.abs(errors)) < 4 * 0.5 / np.sqrt(112)  # four standard errors at the worst s


def test_bands_collide_as_the_formula_says():
    generator = np.random.default_rng(1)
    count, similarity = 4000, 0.75
    a = generator.integers(0, 1 << 32, (count, 112), dtype=np.uint32)
    b = np.where(generator.random((count, 112)) < similarity, a, a + np.uint32(1))
    hit = np.any(mh.band_hashes(a) == mh.band_hashes(b), axis=1).mean()
    assert hit == pytest.approx(collision_probability(similarity, 14, 8), abs=0.025)
    assert collision_probability(0.75, 14, 8) == pytest.approx(0.772, abs=5e-4)  # the table in the literature
    assert collision_probability(0.8, 20, 13) == pytest.approx(0.677, abs=5e-4)


def test_band_hashes_differ_by_band_and_need_enough_permutations():
    signatures = np.arange(24, dtype=np.uint32).reshape(2, 12)
    hashes = mh.band_hashes(signatures, bands=3, rows=4)
    assert hashes.shape == (2, 3)
    assert hashes.dtype == np.uint64
    assert len(np.unique(hashes)) == 6
    same = np.zeros((1, 12), np.uint32)
    assert len(np.unique(mh.band_hashes(same, bands=3, rows=4))) == 3  # the band's number is part of the hash
    with pytest.raises(ValueError, match="need 20 permutations"):
        mh.band_hashes(signatures, bands=5, rows=4)


def test_minhash_refuses_an_ngram_of_0():
    with pytest.raises(ValueError, match="at least 1"):
        mh.minhash(["a"], ngram=0)
