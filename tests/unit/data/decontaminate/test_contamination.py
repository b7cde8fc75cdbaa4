"""Tests of cutting evaluation items out of documents, and of the choice of the matches to report."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.data.decontaminate import EvalIndex, EvalItem, Match, Rules, find
from tidewheel.data.decontaminate.contamination import MARGIN, MAX_PIECES, cut, primary

ITEM = "Which of the planets beyond the belt has the faintest ring and was first drawn by a clockmaker from Bremen?"
INDEX = EvalIndex.build([EvalItem("demo", "1", ITEM)])
RULES = Rules()


def prose(characters: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choices(["zinc", "quartz", "größe", "marble", "slate", "日本"], k=characters))[:characters]


def cut_of(text: str) -> str:
    return cut(INDEX, text, find(INDEX, [text], RULES)[0], RULES)


def test_cut_removes_a_match_with_its_margins():
    before, after = prose(1000), prose(900, 1)
    left = cut_of(f"{before} {ITEM} {after}")
    assert left == f"{before[: -(MARGIN - 1)].strip()}\n\n{after[MARGIN - 2 :].strip()}"  # "? " is in the margin


def test_short_pieces_are_removed_and_a_document_of_short_pieces_is_empty():
    assert cut_of(f"{prose(300)} {ITEM} {prose(900, 1)}").count("\n\n") == 0
    assert cut_of(f"{prose(300)} {ITEM} {prose(300, 1)}") == ""
    assert cut_of(ITEM) == ""


def test_a_document_cut_into_too_many_pieces_is_empty():
    def text(items: int) -> str:
        return f" {ITEM} ".join(prose(700, seed) for seed in range(items + 1))

    assert cut_of(text(MAX_PIECES - 1)).count("\n\n") == MAX_PIECES - 1
    assert cut_of(text(MAX_PIECES)) == ""


@given(st.lists(st.integers(0, 900), min_size=2, max_size=8), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_remaining_pieces_are_clean_and_from_the_document(sizes: list[int], seed: int):
    text = f" {ITEM} ".join(prose(size, seed + number) for number, size in enumerate(sizes))
    left = cut_of(text)
    assert find(INDEX, [left], RULES) == [[]]
    for piece in left.split("\n\n") if left else []:
        assert len(piece) >= MARGIN
        assert piece in text


def test_an_item_whose_halves_a_cut_joins_is_cut_again():
    words = ITEM.split()
    halves = " ".join(words[:10]), " ".join(words[10:])
    inside = f"{prose(MARGIN - 1)} {ITEM} {prose(MARGIN - 1, 1)}"
    assert find(INDEX, [cut_of(f"{prose(500)} {halves[0]} {inside} {halves[1]} {prose(500, 2)}")], RULES) == [[]]


def test_primary_keeps_the_best_of_overlapping_matches():
    def match(item: str, score: float, start: int, end: int) -> Match:
        return Match("b", item, "", score, start, end)

    best, other, later, tie = match("x", 0.9, 0, 50), match("y", 0.8, 40, 90), match("z", 0.5, 60, 99), match(
        "a", 0.9, 10, 30)
    assert primary([other, later, best]) == [best, later]
    assert primary([best, tie]) == [tie]  # the first by id
    assert primary([]) == []
