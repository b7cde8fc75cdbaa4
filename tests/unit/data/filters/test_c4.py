"""C4's rules against the definitions in Python, line by line, and each rule alone."""

import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.filtering import judged
from tests.unit.data.filters.test_gopher_quality import slow_tokens
from tests.unit.data.filters.test_gopher_repetition import clean
from tests.unit.data.text.test_text import ALPHABET, needs_frozen
from tidewheel.data.filters.c4 import C4, REASONS
from tidewheel.data.text import token_table
from tidewheel.data.text.measures import PHRASES

PARTS = ["\n", "\n", "\r\n", " ", "\u3000", "a b c.", "One two three!", "x", '"', "'", "...", "?", "[1]", "[]",
         "[edit]", "[citation needed]",
         "[x]", "{", "Lorem Ipsum", "é.\u0301", "long" * 4, "It is. He is? Go! ", *PHRASES]
DOCUMENTS = st.lists(st.one_of(ALPHABET, st.sampled_from(PARTS)), max_size=25).map("".join)
CONFIGS = st.builds(
    C4, terminal_punctuation=st.booleans(), min_sentences=st.integers(-1, 4), min_words_per_line=st.integers(-1, 3),
    max_word_length=st.sampled_from([-1, 9, 1000]), remove_citations=st.booleans(), javascript=st.booleans(),
    policy=st.booleans(), lorem_ipsum=st.booleans(), curly_bracket=st.booleans())
CITATION = re.compile(r"\[[0-9]*\]|\[edit\]|\[citation needed\]")


def slow_sentences(line: str) -> int:
    table = token_table.load()
    sentences, seen = 0, False
    for place, (token, _) in enumerate(slow_tokens(line)):
        ends = len(token) == 1 and table[ord(token)] & token_table.SENTENCE != 0
        punctuation = all(table[ord(character)] & token_table.PUNCTUATION for character in token)
        if place == 0 or (seen and not ends and not punctuation):
            sentences += 1
            seen = False
        seen |= ends
    return sentences


def slow_c4(document: str, config: C4) -> tuple[str, int, str]:
    """(reason, sentences, edited text)."""
    sentences, kept = 0, []
    for raw, line in zip(document.split("\n"), clean(document).split("\n"), strict=True):
        line = line.strip()
        words = line.split()
        if config.max_word_length != -1 and any(len(word) > config.max_word_length for word in words):
            continue
        bare = CITATION.sub("", line) if config.remove_citations else line
        if config.terminal_punctuation and (not bare.endswith((".", "?", "!", '"', "'")) or bare.endswith("...")):
            continue
        if len(words) < config.min_words_per_line:
            continue
        lowered = "".join(character.lower() if character.isascii() else character for character in bare)
        if config.lorem_ipsum and "lorem ipsum" in lowered:
            return "c4_lorem_ipsum", sentences, document
        if config.javascript and "javascript" in lowered:
            continue
        if config.curly_bracket and "{" in bare:
            return "c4_curly_bracket", sentences, document
        if config.policy and any(phrase in lowered for phrase in PHRASES[2:]):
            continue
        sentences += slow_sentences(bare)
        kept.append(CITATION.sub("", raw.strip()) if bare != line else raw.strip())
    if sentences < config.min_sentences:
        return "c4_too_few_sentences", sentences, document
    return "", sentences, "\n".join(kept).strip()


@needs_frozen
@given(st.lists(DOCUMENTS, min_size=1, max_size=4), CONFIGS)
@examples(100)
def test_matches_the_oracle(documents: list[str], config: C4):
    reasons, statistics, edited = judged(documents, config)
    for place, document in enumerate(documents):
        expected = slow_c4(document, config)
        assert (reasons[place], statistics["c4_sentences"][place], edited[place].as_py()) == expected


@needs_frozen
@pytest.mark.parametrize("document", ["\n\u0300", "a\n\u0300", "a\r\n\u0300 \u0301\n\u0302", "\u0300\n\n\u0300 "])
@pytest.mark.parametrize("config", [C4(terminal_punctuation=False, min_sentences=0, min_words_per_line=least)
                                    for least in (0, 1)])
def test_a_last_line_of_accents_alone_matches_the_oracle(document: str, config: C4):
    """The clean copy of such a document ends with a newline: there is no row of its last line."""
    reasons, statistics, edited = judged([document], config)
    assert (reasons[0], statistics["c4_sentences"][0], edited[0].as_py()) == slow_c4(document, config)


LINES = ["This line has some words.", "So does this one!", "Is it a line?", 'He said "so."', "It's the dogs'"]


@pytest.mark.parametrize(("lines", "reason"), [
    (LINES, ""),
    (LINES[:4], "c4_too_few_sentences"),
    ([*LINES, "Lorem ipsum dolor sit amet."], "c4_lorem_ipsum"),
    ([*LINES, "if (x) { return; }", "It has { in it."], "c4_curly_bracket"),
    ([*LINES, "if (x) { return; }"], ""),  # a line that goes does not count
    ([], "c4_too_few_sentences"),
])
def test_documents(lines: list[str], reason: str):
    assert judged(["\n".join(lines)], C4())[0] == [reason]
    assert reason == "" or reason in REASONS


@pytest.mark.parametrize("line", [
    "no full stop here", "It goes on...", "Two words.", f"It is {'x' * 1001} long.", "Please enable JavaScript here.",
    "Read our Privacy Policy now.", "This site uses cookies for you.", "", "   ",
])
def test_lines_are_removed(line: str):
    reasons, statistics, edited = judged(["\n".join([*LINES[:2], line, *LINES[2:]])], C4())
    assert reasons == [""]
    assert edited.to_pylist() == ["\n".join(LINES)]
    assert statistics["c4_removed_lines"].tolist() == [float(line.strip() != "")]
    assert statistics["c4_kept_lines"].tolist() == [5 / 6 if line.strip() else 1.0]


def test_citations_are_removed_before_end_punctuation_is_checked():
    text = "\n".join(LINES)
    lines = [line[:-1] + "[12]" + line[-1] for line in LINES]
    assert judged(["\n".join(lines)], C4())[2].to_pylist() == [text]
    assert judged(["\n".join([*LINES, "It ends with one.[3]"])], C4())[2].to_pylist() == [text + "\nIt ends with one."]
    assert judged(["\n".join(lines)], C4(remove_citations=False))[2].to_pylist() == ["\n".join(lines)]


def test_kept_lines_keep_their_dropped_characters():
    lines = ["A de\u0301compose\u0301 line\u00ad is here.", *LINES]
    _, _, edited = judged(["\r\n".join(lines)], C4())
    assert edited.to_pylist() == ["\n".join(lines)]


def test_finewebs_form_and_columns_of_arrow():
    texts = pa.chunked_array([["Some words without an end\nand. One. Two. Three. Four."], ["x", None]])
    reasons, statistics, edited = judged(texts, C4(terminal_punctuation=False))
    assert reasons == ["", "c4_too_few_sentences", "c4_too_few_sentences"]
    assert edited.to_pylist() == [texts[0].as_py(), "x", ""]
    assert set(statistics) == set(C4().limits())
    assert all(values.dtype == np.float64 and values.shape == (3,) for values in statistics.values())
    assert len(judged([], C4())[2]) == 0
