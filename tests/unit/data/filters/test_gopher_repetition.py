"""Gopher repetition counts against the definitions in Python, and each rule's threshold."""

import random
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.filtering import judged
from tests.unit.data.filters.test_gopher_quality import slow_tokens
from tests.unit.data.text.test_text import ALPHABET, needs_frozen
from tidewheel.data import textpass
from tidewheel.data.filters.gopher_repetition import REASONS, STATISTICS, GopherRepetition
from tidewheel.data.text import unicode_table as table
from tidewheel.data.text.measures import DUPLICATE, REPETITION, TOP, Measures

# few different words and lines, so that everything repeats
DOCUMENTS = st.one_of(
    st.lists(st.one_of(ALPHABET, st.sampled_from(["\n", "\n\n", "\r\n", "a", "b", "a b", " ", "ß\u0301", "...", "中"])),
             max_size=30).map("".join),
    st.lists(st.sampled_from(["a ", "bc ", "the ", ". ", "É ", "x\n", "a bc the\n", "\n\n"]), max_size=80).map("".join),
)


def clean(document: str) -> str:
    return "".join(c for c in document if table.classify(c) != table.DROPPED).replace("\r\n", "\n")


def repeats(parts: list[str]) -> list[str]:
    return [part for place, part in enumerate(parts) if part in parts[:place]]


def slow_counts(document: str) -> list[int]:
    document = clean(document)
    stripped = document.strip()
    counts = [len(document)]
    for cut in (r"\n+", r"\n{2,}"):
        parts = re.split(cut, stripped) if stripped else []
        counts += [len(parts), len(repeats(parts)), sum(map(len, repeats(parts)))]
    words = [token for token, _ in slow_tokens(document)]
    for n in TOP:
        result = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
        ngram, times = max(result.items(), key=lambda item: item[1], default=((), 0))  # max gives the first seen
        counts.append(len(" ".join(ngram)) * times)
    for n in DUPLICATE:
        seen: set[tuple[str, ...]] = set()
        i = repeated = 0
        while i + n <= len(words):
            ngram = tuple(words[i : i + n])
            if ngram in seen:
                repeated += len("".join(ngram))
                i += n
            else:
                seen.add(ngram)
                i += 1
        counts.append(repeated)
    return counts


@needs_frozen
@given(st.lists(DOCUMENTS, min_size=1, max_size=4))
@examples(100)
def test_counts_match_the_oracle(documents: list[str]):
    result = textpass.measure(documents, Measures(repetition=True)).repetition
    for document, row in zip(documents, result.tolist(), strict=True):
        assert dict(zip(REPETITION, row, strict=True)) == dict(zip(REPETITION, slow_counts(document), strict=True))


def test_longer_documents_match_the_oracle_across_chunks():
    chosen = random.Random(3)
    vocabulary = [f"w{number}" for number in range(40)]
    phrase = " ".join(chosen.choices(vocabulary, k=14))
    documents = []
    for _ in range(12):
        lines = [" ".join(chosen.choices(vocabulary, k=chosen.randint(1, 20))) for _ in range(60)]
        documents.append("\n".join([*lines, phrase, *lines[:5], "", phrase + " and more", *chosen.choices(lines, k=9)]))
    documents.insert(5, ("é" * 500 + " ") * 1500)  # a chunk of its own
    result = textpass.measure(documents, Measures(repetition=True)).repetition.tolist()
    for place in range(len(documents)):
        if place != 5:
            assert result[place] == slow_counts(documents[place])
    assert result[5][0] == 501 * 1500
    assert result[5][7] == 1001 * 1499  # the pair


WORDS = [f"{first}{second}{third}" for first in "bcdfg" for second in "aeiou" for third in "klmnprst"]
UNLIKE = " ".join(WORDS)  # no word twice


def spread(part: str, times: int, unlike: int, joint: str = " ") -> str:
    """The part `times` times, with `unlike` words that occur once between and after."""
    words = WORDS * 2
    words = [word + str(place) for place, word in enumerate(words)]
    step = unlike // times
    return joint.join(f"{part}{joint}{' '.join(words[i * step : (i + 1) * step])}" for i in range(times))


@pytest.mark.parametrize(("document", "reason"), [
    (UNLIKE, ""),
    ("", ""),
    ("one", ""),
    ("\n" + UNLIKE + "\n", ""),
    ("\n\n".join([*WORDS[:60], *["x"] * 30]), "gopher_duplicate_paragraphs"),
    ("\n\n".join([*WORDS[:4], UNLIKE[:99], UNLIKE[:99]]), "gopher_duplicate_paragraph_characters"),
    ("\n".join([*WORDS[:60], *["x"] * 30]), "gopher_duplicate_lines"),
    ("\n".join([*WORDS[:4], UNLIKE[:99], UNLIKE[:99]]), "gopher_duplicate_line_characters"),
    (spread("again perhaps", 12, 96), "gopher_top_2_gram"),
    (spread("so on be", 14, 84), "gopher_top_3_gram"),
    (spread("o n b e", 20, 80), "gopher_top_4_gram"),
])
def test_each_rule(document: str, reason: str):
    reasons, _ = judged([document], GopherRepetition())
    assert reasons == [reason]
    assert reason == "" or reason in REASONS


@pytest.mark.parametrize("n", DUPLICATE)
def test_each_duplicate_ngram_rule(n: int):
    part = " ".join(WORDS[:n])  # this run of n words repeats, no longer one does
    document = spread(part, 3, 24)
    assert judged([document], others_off(f"max_duplicate_{n}_grams"))[0] == [f"gopher_duplicate_{n}_grams"]
    if n < 10:
        assert judged([document], others_off(f"max_duplicate_{n + 1}_grams"))[0] == [""]


def others_off(name: str) -> GopherRepetition:
    off = dict.fromkeys(GopherRepetition.model_fields, 10.0)
    return GopherRepetition(**{**off, name: GopherRepetition.model_fields[name].default})


def test_thresholds_are_those_of_table_a1_and_a_share_equal_to_one_is_kept():
    assert list(GopherRepetition().model_dump().values()) == [
        0.30, 0.20, 0.30, 0.20, 0.20, 0.18, 0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.10]
    lines = [*WORDS[:7], *[WORDS[0]] * 3]  # 3 of 10 lines
    assert judged(["\n".join(lines)], others_off("max_duplicate_lines"))[0] == [""]
    assert judged(["\n".join([*lines, WORDS[0]])], others_off("max_duplicate_lines"))[0] == [
        "gopher_duplicate_lines"]


def test_statistics_and_limits():
    _, statistics = judged([UNLIKE, "", "a a a a"], GopherRepetition())
    assert tuple(statistics) == STATISTICS == tuple(GopherRepetition().limits())
    assert all(values.dtype == np.float64 and values.shape == (3,) for values in statistics.values())
    assert all(values[1] == 0 for values in statistics.values())
    assert statistics["top_2_gram"][2] == 9 / 7  # overlapping pairs all count
