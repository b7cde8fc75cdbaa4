"""Gopher counts against a token rule written with a regular expression, and each rule's threshold."""

import itertools
import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.filtering import judged
from tests.unit.data.text.test_text import ALPHABET, needs_frozen
from tidewheel.data import textpass
from tidewheel.data.filters.gopher_quality import REASONS, GopherQuality
from tidewheel.data.text import token_table
from tidewheel.data.text import unicode_table as table
from tidewheel.data.text.measures import TOKEN_COUNTS, Measures

STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
DOCUMENTS = st.lists(
    st.one_of(ALPHABET, st.sampled_from([
        *STOP_WORDS, "don't", "3.14", "a.b", "a.B", "1,000", "a_b", "__x__", "...", "…", "\n", "\n- ", "\n•", "# ",
        "----", " ", ". ", "..\n", "...\r\n", "’s", "10:30",
        "(", ")", ":", "-", "/", "e.g.", "I'll", "cannot", "10km", "$", "x.com", "http://", "@", "USA.", "A.", "☃",
        ","])),
    max_size=40).map("".join)


def of(bit: int) -> str:
    """A class of a regular expression: the characters with this bit."""
    codes = np.flatnonzero(token_table.load() & bit)
    runs = np.split(codes, np.flatnonzero(np.diff(codes) > 1) + 1)
    return "[" + "".join(f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in runs) + "]"


A, L, U, Q = of(token_table.ALPHA), of(token_table.LOWER), of(token_table.UPPER), of(token_table.QUOTE)
CUR, ICON, STOPS = of(token_table.CURRENCY), of(token_table.ICON), of(token_table.STOPS)
UNITS = "|".join(map(re.escape, token_table.UNITS))
PREFIX = re.compile(rf"{of(token_table.OPENS)}|\.\.+|\+(?![0-9])|US\$|[CA]\$")
SUFFIX = re.compile("|".join(f"(?:{part})$" for part in (
    of(token_table.CLOSES), r"\.\.+", "['’][sS]", r"(?<=[0-9])\+", f"(?<=[0-9]){CUR}", f"(?<=[0-9])(?:{UNITS})",
    rf"(?<={STOPS})\.", rf"(?<={U}{U})\.")))
INFIX = re.compile(
    rf"\.\.+|…|{ICON}|(?<=[0-9])[-+*^](?=[0-9-])|(?<={L[:-1]}{Q[1:]})\.(?={U[:-1]}{Q[1:]})|(?<={A}),(?={A})|"
    rf"(?<={A[:-1]}0-9])(?:-|–|—|--|---|——|~)(?={A})|(?<={A[:-1]}0-9])[:<>=/](?={A})")
HOST = (r"(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|(?:(?:[A-Za-z0-9¡-\uffff][A-Za-z0-9¡-\uffff_-]*)?[A-Za-z0-9¡-\uffff]\.)+"
        rf"{L}{{2,63}})(?::[0-9]{{2,5}})?(?:[/?#].*)?")
ADDRESS = re.compile(rf"(?:[A-Za-z0-9¡-\uffff+._-]{{2,}}://)?{HOST}|.+@{HOST}", re.DOTALL)


def slow_tokens(document: str) -> list[tuple[str, bool]]:
    """(token, is a symbol), by the rules in `quality`'s docstring, with regular expressions."""
    tokens = [token for chunk in document.split() for token in slow_chunk(chunk)]
    symbols = token_table.load() & token_table.SYMBOL
    return [(token, all(symbols[ord(character)] for character in token)) for token in tokens]


def slow_chunk(chunk: str) -> list[str]:
    specials = token_table.special_words()
    before: list[str] = []
    behind: list[str] = []
    size = -1
    while chunk and len(chunk) != size and chunk not in specials:
        size = len(chunk)
        result = PREFIX.match(chunk)
        prefix = result.group() if result else ""
        if prefix and chunk[len(prefix) :] in specials:
            before, chunk = [*before, prefix], chunk[len(prefix) :]
            break
        result = SUFFIX.search(chunk[len(prefix) :])
        suffix = result.group() if result else ""
        if suffix and chunk[: -len(suffix)] in specials:
            behind, chunk = [suffix, *behind], chunk[: -len(suffix)]
            break
        before += [prefix] if prefix else []
        behind = [suffix, *behind] if suffix else behind
        chunk = chunk[len(prefix) : len(chunk) - len(suffix)]
    if chunk in specials:
        inner = list(specials[chunk])
    else:
        cuts = [result.span() for result in INFIX.finditer(chunk) if result.start() > 0]
        if not cuts or ADDRESS.fullmatch(chunk):
            inner = [chunk]
        else:
            places = [0, *(place for span in cuts for place in span), len(chunk)]
            inner = [chunk[start:end] for start, end in itertools.pairwise(places)]
    return slow_join([token for token in [*before, *inner, *behind] if token])


def slow_join(tokens: list[str]) -> list[str]:
    joined: list[str] = []
    pairs = token_table.special_words()
    position = 0
    while position < len(tokens):
        pair = tokens[position : position + 2]
        both = "".join(pair)
        if len(pair) == 2 and len(both) == 2 and both.isascii() and both in pairs and any(
                unicodedata.category(character)[0] == "P" for character in both):
            joined.append(both)
            position += 2
        else:
            joined.append(tokens[position])
            position += 1
    return joined


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
@examples(80)
def test_counts_match_the_oracle(documents: list[str]):
    result = textpass.measure(documents, Measures(token_counts=True)).token_counts
    for document, row in zip(documents, result.tolist(), strict=True):
        assert dict(zip(TOKEN_COUNTS, row, strict=True)) == dict(zip(TOKEN_COUNTS, slow_counts(document), strict=True))


@pytest.mark.parametrize(("document", "tokens"), [  # as spaCy 3.8 has them
    ("don't DON'T it's. he’s I'll cannot", [
        "do", "n't", "DON'T", "it", "'s", ".", "he", "’s", "I", "'ll", "can", "not"]),
    ("3.14 and 1,000 at 10:30", ["3.14", "and", "1,000", "at", "10:30"]),
    ("end.Next (e.g. x) Mr. A. U.S.A. USA.", [
        "end", ".", "Next", "(", "e.g.", "x", ")", "Mr.", "A.", "U.S.A.", "USA", "."]),
    ("snake_case __init__ a/b x=1", ["snake_case", "_", "_", "init", "_", "_", "a", "/", "b", "x=1"]),
    ("wait... ---- !? hello--world --flag", ["wait", "...", "----", "!", "?", "hello", "--", "world", "--flag"]),
    ("中文，好。 ok", ["中文，好", "。", "ok"]),
    ("well-known 'quoted' **bold**", ["well", "-", "known", "'", "quoted", "'", "*", "*", "bold", "*", "*"]),
    ("10km 2.5GB $5 5$ 9pm 50%", ["10", "km", "2.5", "GB", "$", "5", "5", "$", "9", "pm", "50", "%"]),
    ("http://foo.com/a-b foo.bar/baz me@x-y.org/q:a [link](http://x.com/a)", [
        "http://foo.com/a-b", "foo.bar/baz", "me@x-y.org/q:a", "[", "link](http://x.com", "/", "a", ")"]),
    ("f(self): a:x :-) ok:)", ["f(self", "):", "a", ":x", ":-)", "ok", ":)"]),
])
def test_token_rule(document: str, tokens: list[str]):
    assert [token for token, _ in slow_tokens(document)] == tokens
    assert textpass.measure([document]).tokens.tolist() == [len(tokens)]


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
    reasons, _ = judged([document], GopherQuality())
    assert reasons == [reason]
    assert reason == "" or reason in REASONS


def test_too_many_words_and_boundaries():
    strict = GopherQuality(max_words=100)
    assert judged([GOOD, "The cat and the dog " * 20, "The cat and the dog " * 20 + "more"], strict)[0] == [
        "gopher_too_many_words", "", "gopher_too_many_words"]
    assert judged(["The cat and the dog " * 10], GopherQuality())[0] == [""]  # exactly 50 words is kept


def test_statistics_and_limits():
    reasons, statistics = judged([GOOD, ""], GopherQuality())
    assert reasons == ["", "gopher_too_few_words"]
    assert set(statistics) == set(GopherQuality().limits())
    assert all(values.dtype == np.float64 and values.shape == (2,) for values in statistics.values())
    assert statistics["words"].tolist() == [120.0, 0.0]
    assert statistics["bullet_lines"][1] == 0
