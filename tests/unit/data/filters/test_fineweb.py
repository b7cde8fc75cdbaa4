"""FineWeb counts against the definitions in Python, and each rule's threshold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.filtering import judged
from tests.unit.data.filters.test_gopher_quality import slow_tokens
from tests.unit.data.filters.test_gopher_repetition import WORDS, clean, repeats
from tests.unit.data.text.test_text import ALPHABET, needs_frozen
from tidewheel.data import textpass
from tidewheel.data.filters.fineweb import REASONS, FineWeb
from tidewheel.data.text.measures import LINE_COUNTS

DOCUMENTS = st.lists(
    st.one_of(ALPHABET, st.sampled_from(
        ["\n", "\r\n", " \n", "a", "a.\n", "é!\n", "'", '"', "?", "…", "。\n", "\u3000", ".\u0301", "one two\n"])),
    max_size=30).map("".join)


def slow_counts(document: str, config: FineWeb) -> list[int]:
    document = clean(document)
    lines = [line for line in document.split("\n") if line.strip() != ""]
    return [
        len(lines), sum(line.endswith(tuple(config.terminal_punctuation)) for line in lines),
        sum(len(line) <= config.short_line for line in lines), sum(map(len, repeats(lines))),
        len(document.replace("\n", "")), document.count("\n"),
    ]


@needs_frozen
@given(st.lists(DOCUMENTS, min_size=1, max_size=4), st.sampled_from([FineWeb(short_line=3), FineWeb(
    short_line=0, terminal_punctuation="。…"), FineWeb()]))
@examples(100)
def test_counts_match_the_oracle(documents: list[str], config: FineWeb):
    result = textpass.measure(documents, config.measures()).line_counts
    for document, row in zip(documents, result.tolist(), strict=True):
        expected = slow_counts(document, config)
        assert dict(zip(LINE_COUNTS, row, strict=True)) == dict(zip(LINE_COUNTS, expected, strict=True))
    _, statistics = judged(documents, config)
    for document, value in zip(documents, statistics["fineweb_newlines_per_word"].tolist(), strict=True):
        tokens = len(slow_tokens(clean(document)))
        assert value == (clean(document).count("\n") / tokens if tokens else 0)


@needs_frozen
@pytest.mark.parametrize("document", [
    "a.\u066e\U00016800\n", "a.\U00020000\U00020001\n", "a.\U00020000b.cc\n", "ab.c\U00020000:80/x\n", "a.\U00020000\n",
    "a.\U00010400\U00010400\n", "x@a.\U00020000\U00020001\n", "http://a.\U00020000\U00020001\n", "\U00020000.ab\n"])
def test_hosts_with_letters_beyond_the_basic_plane_match_the_oracle(document: str):
    _, statistics = judged([document], FineWeb())
    assert statistics["fineweb_newlines_per_word"][0] == 1 / len(slow_tokens(clean(document)))


LINES = [" ".join(WORDS[place : place + 10]) + "." for place in range(0, 190, 10)]
OPEN = [line.replace(".", ",") for line in LINES]


@pytest.mark.parametrize(("lines", "reason"), [
    (LINES, ""),
    ([], "fineweb_too_few_terminal_lines"),
    ([" ", "", "\t"], "fineweb_too_few_terminal_lines"),
    ([*LINES[:1], *OPEN[1:]], "fineweb_too_few_terminal_lines"),
    ([line.replace(".", "\u201d") for line in LINES], "fineweb_too_few_terminal_lines"),
    ([line + " " for line in LINES], "fineweb_too_few_terminal_lines"),
    ([*LINES[:5], *(line[:25] + "." for line in LINES[5:])], "fineweb_too_many_short_lines"),
    ([*LINES, LINES[0]], "fineweb_duplicate_lines"),
    ([*LINES, *[""] * 150], "fineweb_too_many_newlines"),
    ([*LINES, *[""] * 30], ""),
])
def test_each_rule(lines: list[str], reason: str):
    for joint in ("\n", "\r\n"):
        reasons, _ = judged([joint.join(lines)], FineWeb())
        assert reasons == [reason]
    assert reason == "" or reason in REASONS


def test_thresholds_are_those_of_fineweb_and_a_value_equal_to_one_is_kept():
    values = FineWeb().model_dump()
    assert [values[name] for name in ("min_terminal_lines", "max_short_lines", "max_duplicate_line_characters",
                                      "max_newlines_per_word", "short_line")] == [0.12, 0.67, 0.01, 0.3, 30]
    lines = [*LINES[:3], *OPEN[:15]]
    assert judged(["\n".join(lines)], FineWeb(min_terminal_lines=3 / 18))[0] == [""]
    exact = "a" * 29 + "."  # 30 characters are short, 31 are not
    counts = textpass.measure([f"{exact}\na{exact}\né{exact[1:]}"], FineWeb().measures()).line_counts
    assert counts[0].tolist()[:3] == [3, 3, 2]


def test_more_terminal_punctuation():
    document = "\n".join(line.replace(".", "\u201d") for line in LINES)
    assert judged([document], FineWeb(terminal_punctuation=".!?\"'\u201d"))[0] == [""]


def test_statistics_and_limits():
    _, statistics = judged(["\n".join(LINES), ""], FineWeb())
    assert set(statistics) == set(FineWeb().limits())
    assert all(values.dtype == np.float64 and values.shape == (2,) for values in statistics.values())
    assert all(values[1] == 0 for values in statistics.values())
