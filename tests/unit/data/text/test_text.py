"""Words and normalised text against an oracle written with unicodedata, one character at a time."""

import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.data import text
from tidewheel.data.text import unicode_table

# text that hits every class: ASCII, digits, accents, marks, Hangul, ideographs, Thai, Arabic, emoji, format characters
ALPHABET = st.one_of(
    st.characters(codec="utf-8"),
    st.sampled_from("abzABZ019 .,'-_\n\täÖßéΣσςЙйİıａ１٣中文字ひがカ가힣"
                    "ไทยกำ हिन्दी العَرَبِيَّة\u0301\u00ad\u200b\u200d\ufeff\u3099😀²Ⅷ"),
)
TEXTS = st.lists(st.text(ALPHABET, max_size=60), max_size=6)


def slow_words(document: str, keep_digits: bool) -> list[str]:
    """Apply the definition in `text`'s docstring literally."""
    words: list[str] = []
    current, solo, in_digits = "", False, False
    for character in document:
        kind = unicode_table.classify(character)
        if kind == unicode_table.DROPPED:
            continue
        ends = kind in (unicode_table.SEPARATOR, unicode_table.SOLO) or (solo and kind != unicode_table.MARK)
        if ends and current:
            words.append(current)
            current, solo, in_digits = "", False, False
        if kind == unicode_table.SEPARATOR:
            continue
        if not current:
            solo = kind == unicode_table.SOLO
        if kind == unicode_table.DIGIT and not keep_digits:
            current += "" if in_digits else "0"
            in_digits = True
        else:
            current += unicode_table.fold(character)
            in_digits = False
    return [*words, current] if current else words


def is_frozen_unicode() -> bool:
    return unicodedata.unidata_version == unicode_table.UNICODE_VERSION


needs_frozen = pytest.mark.skipif(not is_frozen_unicode(), reason="this Python's Unicode is not the table's")


@needs_frozen
def test_the_package_table_matches_its_definition():
    for shipped, built in zip(unicode_table.load(), unicode_table.build(), strict=True):
        np.testing.assert_array_equal(shipped, built)


def test_folding_turns_a_byte_into_at_most_three():
    entries, _ = unicode_table.load()
    length = entries >> unicode_table.LENGTH_SHIFT & unicode_table.LENGTH_BITS
    codes = np.arange(unicode_table.CODE_POINTS)
    utf8 = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    assert np.all(length <= 3 * utf8)


@needs_frozen
@given(TEXTS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_words_match_a_plain_implementation(texts: list[str], keep_digits: bool):
    expected = [slow_words(document, keep_digits) for document in texts]
    assert text.normalise(texts, keep_digits=keep_digits).to_pylist() == [" ".join(words) for words in expected]
    result = text.words(texts, keep_digits=keep_digits)
    assert np.diff(result.offsets).tolist() == [len(words) for words in expected]
    by_word: dict[str, int] = {}
    for word, value in zip((w for words in expected for w in words), result.hashes.tolist(), strict=True):
        assert by_word.setdefault(word, value) == value  # a hash depends on the word alone
    assert len(set(by_word.values())) == len(by_word)


@given(TEXTS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_spans_point_at_the_word_and_normalising_twice_changes_nothing(texts: list[str], keep_digits: bool):
    once = text.normalise(texts, keep_digits=keep_digits)
    assert text.normalise(once, keep_digits=keep_digits).equals(once)
    result = text.words(texts, keep_digits=keep_digits)
    for number, document in enumerate(texts):
        data, words = document.encode(), once[number].as_py().split()
        for index, word in enumerate(words, int(result.offsets[number])):
            span = data[result.starts[index] : result.ends[index]].decode()
            assert text.normalise([span], keep_digits=keep_digits)[0].as_py() == word


@given(st.text(ALPHABET, max_size=60))
@settings(max_examples=60, deadline=None)
def test_composed_and_decomposed_texts_agree(document: str):
    forms = [unicodedata.normalize(form, document) for form in ("NFC", "NFD")]
    first, second = text.normalise(forms).to_pylist()
    assert first == second


def test_known_texts_are_normalised():
    texts = ["Hello,  WORLD!  42 times 3.14 a1b22", "Ångström Σίσυφος naïve", "中文字 mixed中文text",
             "a\u00adb don't", "!!!"]
    assert text.normalise(texts).to_pylist() == [
        "hello world 0 times 0 0 a0b0", "angstrom σισυφοσ naive", "中 文 字 mixed 中 文 text", "ab don t", ""]
    assert text.normalise(["42 ٤٢ 3.14"], keep_digits=True).to_pylist() == ["42 42 3 14"]


@pytest.mark.parametrize("make", [
    lambda texts: pa.array(texts),
    lambda texts: pa.array(["x", *texts], pa.large_string())[1:],
    lambda texts: pa.chunked_array([pa.array(texts[:1]), pa.array(texts[1:])]),
    lambda texts: pa.array([None if item == "" else item for item in texts], pa.large_string()),
])
def test_every_arrow_layout_gives_the_same_words(make):
    texts = ["one two", "", "three 4", "fünf"]
    assert text.normalise(make(texts)).to_pylist() == ["one two", "", "three 0", "funf"]


def test_no_texts_give_no_words_and_other_types_are_refused():
    assert len(text.normalise([])) == 0
    assert text.words(pa.chunked_array([], pa.large_string())).offsets.tolist() == [0]
    with pytest.raises(TypeError, match="expected a string column"):
        text.normalise(pa.array([1, 2]))


def test_chunks_cover_documents_of_any_size():
    offsets = np.array([0, 5, 5, 5, 100, 101])
    for limit in (1, 6, 50, 1000):
        ranges = list(text.chunks(offsets, limit))
        assert [document for first, last in ranges for document in range(first, last)] == list(range(5))


def test_broken_utf8_is_a_separator_and_stays_inside_its_document():
    data = b"ab\xff cd\xe4\xbd" + b"xyz"
    offsets = np.array([0, 8, 11], np.int64)
    array = pa.LargeStringArray.from_buffers(2, pa.py_buffer(offsets.tobytes()), pa.py_buffer(data))
    assert text.normalise(array).to_pylist() == ["ab cd", "xyz"]
