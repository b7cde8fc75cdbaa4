"""RefinedWeb's line rules against the same rules written with Python's strings and regular expressions."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.filtering import judged
from tests.unit.data.filters.test_gopher_quality import GOOD
from tests.unit.data.text.test_text import ALPHABET, needs_frozen
from tidewheel.config import build
from tidewheel.data.filters.refinedweb import COUNTED, REASON, RefinedWeb, remove_lines
from tidewheel.errors import ConfigError

COUNTER = re.compile(rf"^\W*\d[,.\d]*[kmb]?\s+(?:{'|'.join(COUNTED)})\W*$", re.IGNORECASE)
PIECES = st.sampled_from([
    "\n", "\n\n", " ", "\t", "\u3000", "a", "A", "É", "é", "ǅ", "1", "٣", "²", "3 likes", "1,204 Views!", "3.1K shares",
    "12likes", "٣ followers", "x 3 likes", "3 likes more", "_3 likes", "items in cart", "2 Items In Cart",
    "Read more...", "read more...  ", "and read more...", "Sign-in", "sign-in here", "two words", "UPPER CASE line",
    "\r\n", "漢字", "one two three four five six seven eight nine ten"])
DOCUMENTS = st.lists(st.one_of(PIECES, PIECES, ALPHABET), max_size=25).map("".join)
CONFIGS = st.sampled_from([RefinedWeb(), RefinedWeb(min_line_words=0, short_line_words=3, max_uppercase=0.2),
                           RefinedWeb(counters=False, phrases=("a", "1"), end_phrases=(), start_phrases=("two", "x ")),
                           RefinedWeb(max_digits=0.3)])


def is_upper(character: str) -> bool:
    return unicodedata.category(character) in ("Lu", "Lt")


def slow_line(line: str, config: RefinedWeb) -> tuple[str | None, int]:
    """(what is left of the line, phrases cut); None = the line goes."""
    words = line.split()
    if not words:
        return line, 0
    upper = sum(map(is_upper, line)) / len(line)
    digits = sum(unicodedata.category(character) == "Nd" for character in line) / len(line)
    if upper > config.max_uppercase or digits > config.max_digits or len(words) < config.min_line_words:
        return None, 0
    if config.counters and COUNTER.search(line):
        return None, 0
    if len(words) > config.short_line_words:
        return line, 0
    cut = 0
    for phrases, pattern in ((config.phrases, r"\s?(?i:%s)"), (config.end_phrases, r"\s?(?i:%s)(?=\s*\Z)"),
                             (config.start_phrases, r"\A(?i:%s)\s?")):
        for phrase in phrases:
            line, times = re.subn(pattern % f"(?a:{re.escape(phrase)})", "", line)
            cut += times
    return (line if line.strip() else None) if cut else line, cut


def slow(document: str, config: RefinedWeb) -> tuple[list[int], str]:
    lines = document.split("\n")
    kept, removed, cut = [], 0, 0
    for line in lines:
        left, times = slow_line(line, config)
        cut += times
        if left is None:
            removed += 1
        else:
            kept.append(left)
    text = "\n".join(kept)
    if removed or cut:
        text = text.strip(" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f")
    return [len(document.split()), len(text.split()), removed, cut], text


@needs_frozen
@given(st.lists(DOCUMENTS, min_size=1, max_size=4), CONFIGS)
@examples(150)
def test_remaining_text_matches_the_oracle(documents: list[str], config: RefinedWeb):
    counts, edited = remove_lines(documents, config)
    for document, row, text in zip(documents, counts.tolist(), edited.to_pylist(), strict=True):
        expected, left = slow(document, config)
        assert (row, text) == (expected, left)


@pytest.mark.parametrize(("line", "left"), [
    ("THE WHOLE LINE SHOUTS", None), ("The start of a line", "The start of a line"), ("20241121", None),
    ("2024 and 2025", "2024 and 2025"), ("Menu", None), ("3 likes", None), ("· 1,204 Views ·", None),
    ("3.1K Followers", None), ("3 likes and 4 shares", "3 likes and 4 shares"), ("likes 3 shares", "likes 3 shares"),
    ("You have 2 items in cart today", "You have 2 today"), ("items in cart", None),
    ("The rest of the story. Read more...", "The rest of the story."), ("Read more...", None),
    ("Read more... about it", "Read more... about it"), ("Sign-in or register now", "or register now"),
    ("Please sign-in", "Please sign-in"), ("", ""),
    ("a line of many words, in which nobody expects the phrase items in cart to be cut out",) * 2,
])
def test_each_rule(line: str, left: str | None):
    document = f"Some text before it.\n{line}\nSome text after it."
    _, _, edited = judged([document], RefinedWeb())
    assert edited[0].as_py() == f"Some text before it.\n{'' if left is None else left + chr(10)}Some text after it."


def test_a_document_that_loses_too_much_is_dropped():
    word_count = len(GOOD.split())
    share = 2 / (word_count + 2)
    for limit, reason in ((share, ""), (share * 0.99, REASON)):
        reasons, statistics, edited = judged([GOOD + "\n3 likes"], RefinedWeb(max_removed_words=limit))
        assert reasons == [reason]
        assert statistics["refinedweb_removed_words"].tolist() == pytest.approx([share])
        assert statistics["refinedweb_removed_lines"].tolist() == [1]
        assert edited.to_pylist() == [GOOD.strip()]


def test_documents_with_nothing_to_remove_are_unchanged():
    documents = [GOOD, "", " \n", "\n a line with spaces around it \n\n", "two words\r\n\r\n", "plain words"]
    reasons, statistics, edited = judged(documents, RefinedWeb())
    assert edited.to_pylist() == documents
    assert reasons == [""] * len(documents)
    assert set(statistics) == set(RefinedWeb().limits())


def test_phrases_are_checked():
    with pytest.raises(ConfigError, match="is not a phrase"):
        build(RefinedWeb, {"phrases": ["panier à moi"]})
