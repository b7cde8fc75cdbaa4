"""The combined pass gives the same measures as separate passes for each filter, hash and signature."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.filtering import everything, judged
from tests.unit.data.filters.test_c4 import DOCUMENTS as LINES
from tests.unit.data.filters.test_gopher_quality import DOCUMENTS as TOKENS
from tests.unit.data.filters.test_gopher_repetition import DOCUMENTS as REPEATS
from tests.unit.data.text.test_text import ALPHABET, is_frozen_unicode
from tidewheel.data import text, textpass
from tidewheel.data.dedup import minhash
from tidewheel.data.filters.c4 import C4
from tidewheel.data.filters.fineweb import FineWeb
from tidewheel.data.filters.gopher_quality import GopherQuality
from tidewheel.data.filters.gopher_repetition import GopherRepetition
from tidewheel.data.text import hashing, token_table, unicode_table
from tidewheel.data.text.measures import Measures

DOCUMENTS = st.one_of(
    LINES, TOKENS, REPEATS, st.text(ALPHABET, max_size=200),
    st.lists(st.sampled_from([*"abyzABYZ", "the", "with", "sixteen", "internationally", " ", " ", ". ", "é", "\n"]),
             max_size=80).map("".join))


@given(st.lists(DOCUMENTS, max_size=6))
@examples(80)
def test_the_fused_pass_equals_separate_passes(documents: list[str]):
    line_rules = C4(terminal_punctuation=False, min_sentences=1, min_words_per_line=1)
    filters = (GopherQuality(), GopherRepetition(), FineWeb(), line_rules)
    measured = textpass.measure(documents, Measures.of_all(filter.measures() for filter in filters), minhash=(3, 20, 4),
                             hashes=True)
    for filter in filters:
        for one, other in zip(judged(documents, filter)[:2], judged(documents, filter, measured)[:2], strict=True):
            np.testing.assert_equal(one, other)
    assert judged(documents, line_rules)[2].equals(measured.edited)
    np.testing.assert_array_equal(measured.hashes, hashing.text_hashes(documents))
    signatures = minhash.minhash(documents, ngram=3, num_permutations=20, seed=4)
    np.testing.assert_array_equal(measured.signatures, signatures.signatures)
    np.testing.assert_array_equal(measured.shingles, signatures.shingles)


@given(st.lists(DOCUMENTS, max_size=6))
@examples(80)
def test_words_equal_those_of_the_text_module(documents: list[str]):
    words, normalised = text.words(documents), text.normalise(documents, keep_digits=True).to_pylist()
    for part in textpass.scan(documents):
        for d in range(part.last - part.first):
            number = part.first + d
            own = part.words[part.word_offsets[d] : part.word_offsets[d + 1]]
            np.testing.assert_array_equal(own, words.hashes[words.offsets[number] : words.offsets[number + 1]])
            raw = part.normalised[part.normalised_offsets[d] : part.normalised_offsets[d + 1]]
            assert raw.tobytes().decode() == normalised[number]


def test_chunk_size_does_not_change_measures(monkeypatch):
    documents = [f"Document {number}, in words. " * (number % 9) + "é\n\n\"x\"" * (number % 4) for number in range(150)]
    settings_ = {"minhash": (5, 16, 1), "hashes": True}
    whole = textpass.measure(documents, everything(), **settings_)
    monkeypatch.setattr(textpass, "CHUNK_BYTES", 100)
    parts = textpass.measure(documents, everything(), **settings_)
    for name in ("tokens", "token_counts", "repetition", "line_counts", "kept_lines", "hashes", "signatures",
                 "shingles"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))
    assert whole.edited.equals(parts.edited)


def test_no_measures_and_no_texts():
    measured = textpass.measure(["Three words here", ""])
    assert measured.tokens.tolist() == [3, 0]
    assert measured.token_counts is measured.hashes is measured.edited is None
    assert textpass.measure([], Measures(token_counts=True), hashes=True).hashes.shape == (0, 2)


@pytest.mark.skipif(not is_frozen_unicode(), reason="this Python's Unicode is not the table's")
def test_the_package_table_matches_its_definition():
    np.testing.assert_array_equal(token_table.load(), token_table.build())
    assert unicodedata.unidata_version == unicode_table.UNICODE_VERSION


def test_tokens_of_special_words_join_to_their_chunk():
    words = token_table.special_words()
    assert all("".join(tokens) == chunk for chunk, tokens in words.items())
    assert words["don’t"] == ("do", "n’t")
    assert "shed" not in words
