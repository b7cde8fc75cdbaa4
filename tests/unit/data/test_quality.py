"""Gopher counts against a token rule written with a regular expression, and each rule's threshold."""

import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.test_text import ALPHABET, needs_frozen
from tidewheel.data import unicode_table as table
from tidewheel.data.quality import COUNTS, REASONS, GopherQuality, count_tokens, gopher_quality

STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
DOCUMENTS = st.lists(
    st.one_of(ALPHABET, st.sampled_from([
        *STOP_WORDS, "don't", "3.14", "a.b", "a.B", "1,000", "a_b", "__x__", "...", "…", "\n", "\n- ", "\n•", "# ",
        "----", " ", ". ", "..\n", "...\r\n", "’s", "10:30"])),
    max_size=40).map("".join)


JOINED = r"(?:[LUDM]|u(?=[LUDM])|p(?=[LDM])|(?<=D)c(?=D))*"
WORD, CLITIC, SOLO = (re.compile(pattern) for pattern in (f"[LUDM]{JOINED}", f"q[LUDM]{JOINED}", "SM*"))
MARKS = {"_": "u", ".": "p", ",": "c", ":": "c", "'": "q", "’": "q"}


def slow_tokens(document: str) -> list[tuple[str, bool]]:
    """(token, is a symbol), by regular expressions over a string of character classes."""
    classes = "".join(_letter(character) for character in document)
    tokens: list[tuple[str, bool]] = []
    i, word_end = 0, -1
    while i < len(classes):
        found = (CLITIC if i == word_end else WORD).match(classes, i) or SOLO.match(classes, i)
        if found and classes[i] != "S":
            word_end = found.end()
        if found:
            tokens.append((document[i : found.end()], False))
            i = found.end()
        elif classes[i] == " ":
            i += 1
        else:
            end = i
            while end < len(document) and document[end] == document[i]:
                end += 1
            tokens.append((document[i:end], True))
            i = end
    return tokens


def _letter(character: str) -> str:
    if character.isspace():
        return " "
    kind = table.classify(character)
    if kind == table.LETTER:
        return "U" if unicodedata.category(character) in ("Lu", "Lt") else "L"
    return {table.DIGIT: "D", table.SOLO: "S", table.MARK: "M"}.get(kind, MARKS.get(character, "x"))


def slow_counts(document: str) -> list[int]:
    document = "".join(c for c in document if table.classify(c) != table.DROPPED)
    tokens = slow_tokens(document)
    words = [token for token, symbol in tokens if not symbol]
    lines = document.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    return [
        len(tokens), len(tokens) - len(words), sum(map(len, words)),
        sum(any(map(str.isalpha, word)) for word in words), len(STOP_WORDS & set(words)),
        document.count("#"), document.count("...") + document.count("…"), len(lines),
        sum(line.lstrip().startswith(("-", "•")) for line in lines),
        sum(line.rstrip().endswith(("...", "…")) for line in lines),
    ]


@needs_frozen
@given(st.lists(DOCUMENTS, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_counts_match_the_oracle(documents: list[str]):
    found = count_tokens(documents)
    for document, row in zip(documents, found.tolist(), strict=True):
        assert dict(zip(COUNTS, row, strict=True)) == dict(zip(COUNTS, slow_counts(document), strict=True))


@pytest.mark.parametrize(("document", "tokens"), [
    ("don't", ["don", "'t"]),
    ("3.14 and 1,000 at 10:30", ["3.14", "and", "1,000", "at", "10:30"]),
    ("end.Next e.g. x", ["end", ".", "Next", "e.g", ".", "x"]),
    ("snake_case __init__", ["snake_case", "__", "init", "__"]),
    ("wait... ---- !?", ["wait", "...", "----", "!", "?"]),
    ("中文 ok", ["中", "文", "ok"]),
    ("well-known 'quoted'", ["well", "-", "known", "'", "quoted", "'"]),
])
def test_token_rule(document: str, tokens: list[str]):
    assert [token for token, _ in slow_tokens(document)] == tokens
    assert count_tokens([document])[0, 0] == len(tokens)


GOOD = "The cat sat with the dog and they have lots of fun. " * 10


@pytest.mark.parametrize(("document", "reason"), [
    (GOOD, ""),
    ("", "gopher_too_few_words"),
    ("one two three", "gopher_too_few_words"),
    ("a to " * 60, "gopher_words_too_short"),
    ("internationalisation of to telecommunication " * 60, "gopher_words_too_long"),
    (GOOD + "# " * 40, "gopher_too_many_hashes"),
    (GOOD + "wait... " * 30, "gopher_too_many_ellipses"),
    ("- The cat and the dogs with them have been here\n" * 10, "gopher_too_many_bullet_lines"),
    ("The cat and the dogs with them have been here...\n" * 5 + "The cat with dogs\n" * 5,
     "gopher_too_many_ellipsis_lines"),
    (GOOD + "1234 5678 " * 30, "gopher_too_few_alphabetic_words"),
    ("cats dogs birds mice some words that repeat " * 10, "gopher_too_few_stop_words"),
])
def test_each_rule(document: str, reason: str):
    reasons, _ = gopher_quality([document], GopherQuality())
    assert reasons == [reason]
    assert reason == "" or reason in REASONS


def test_too_many_words_and_boundaries():
    strict = GopherQuality(max_words=100)
    assert gopher_quality([GOOD, "The cat and the dog " * 20, "The cat and the dog " * 20 + "more"], strict)[0] == [
        "gopher_too_many_words", "", "gopher_too_many_words"]
    assert gopher_quality(["The cat and the dog " * 10], GopherQuality())[0] == [""]  # exactly 50 words is kept


def test_statistics_and_limits():
    reasons, statistics = gopher_quality([GOOD, ""], GopherQuality())
    assert reasons == ["", "gopher_too_few_words"]
    assert set(statistics) == set(GopherQuality().limits())
    assert all(values.dtype == np.float64 and values.shape == (2,) for values in statistics.values())
    assert statistics["words"].tolist() == [120.0, 0.0]
    assert statistics["bullet_lines"][1] == 0
