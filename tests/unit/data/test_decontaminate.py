"""Planted items are found, neighbours are not, whatever way the text was dressed."""

import gzip
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel import storage
from tidewheel.data.decontaminate import EvalIndex, EvalItem, Match, contaminated, fingerprints, read_eval_items
from tidewheel.errors import InputError

LONG = ("A train leaves the harbour at nine in the morning carrying forty crates of oranges while another one, "
        "heavier by half, follows it two hours later along the coast; when the second train reaches the lighthouse, "
        "how many crates did the first one already unload at the villages of Alder, Birch and Cedar, if each village "
        "takes a quarter of whatever is left on board when it arrives there in the afternoon?")
MIDDLE = "Which of the planets beyond the belt has the faintest ring and was first drawn by a clockmaker from Bremen?"
SHORT = "Do blue herons sleep standing upright?"
ITEMS = [EvalItem("demo", "long", LONG), EvalItem("demo", "middle", MIDDLE), EvalItem("tiny", "short", SHORT)]
VOCABULARY = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ra", "so") for b in ("bor", "dan", "fel", "gum")]
INDEX = EvalIndex.build(ITEMS)


def filler(count: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=count))


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.item)
@pytest.mark.parametrize("dress", [
    str, str.upper, lambda t: t.replace(" ", "\n  "), lambda t: t.replace(",", "").replace("?", "!"),
    lambda t: t.replace("e", "é"),
])
def test_whole_items_are_found_however_they_are_dressed(item: EvalItem, dress):
    planted = dress(item.text)
    document = f"{filler(300)} {planted} {filler(200, 1)}"
    match = contaminated(INDEX, [filler(50), document])[1]
    assert match is not None
    assert (match.benchmark, match.item, match.score) == (item.name, item.item, 1.0)
    assert match.text == planted.rstrip("?!")


def test_nothing_is_found_where_nothing_is():
    assert contaminated(INDEX, [filler(2000), "", "Do herons sleep?", "the first one already"]) == [None] * 4
    assert contaminated(EvalIndex.build([]), [LONG]) == [None]


def test_an_edited_or_halved_item_is_found():
    words = LONG.split()
    words[30] = "lemons"
    edited = contaminated(INDEX, [" ".join(words)])[0]
    assert edited is not None
    assert 0.6 < edited.score < 1.0
    half = contaminated(INDEX, [" ".join(LONG.split()[: len(LONG.split()) // 2]) + " " + filler(99)])[0]
    assert half is not None
    assert half.score == pytest.approx(0.5, abs=0.03)
    assert contaminated(INDEX, [MIDDLE.replace("faintest", "oldest")])[0] is not None
    assert contaminated(INDEX, [SHORT.replace("sleep", "rest")]) == [None]  # short items only as a whole


def test_pieces_scattered_over_a_long_document_do_not_add_up():
    words = LONG.split()
    pieces = [" ".join(words[i : i + 13]) for i in range(0, len(words) - 13, 13)]
    assert contaminated(INDEX, [" ".join(pieces)])[0] is not None
    assert contaminated(INDEX, [filler(200).join(pieces)]) == [None]


def test_stock_phrases_do_not_count():
    stock = "which of the following statements about the topic named above is the most accurate one"
    items = [EvalItem("stock", str(number), f"{stock} {filler(14, number)}") for number in range(200)]
    index = EvalIndex.build(items)
    assert contaminated(index, [f"{filler(50, 999)} {stock} {filler(50, 998)}"]) == [None]
    match = contaminated(index, [f"{filler(50, 999)} {items[7].text} and more"])[0]
    assert match is not None
    assert (match.item, match.score) == ("7", 1.0)
    alone = EvalIndex.build(items[:1])
    assert contaminated(alone, [f"{filler(50, 999)} {stock} {filler(50, 998)}"])[0] is not None  # rare here: it counts


def test_numbers_and_very_short_items_are_not_evidence():
    items = [EvalItem("n", "matrix", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"), EvalItem("n", "word", "forks")]
    assert contaminated(EvalIndex.build(items), ["1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 forks and knives"]) == [None]


def test_the_best_item_is_reported_and_ties_are_settled_by_name():
    both = EvalIndex.build([*ITEMS, EvalItem("a", "copy", MIDDLE)])
    match = contaminated(both, [f"{LONG[: len(LONG) // 2]} {MIDDLE}"])[0]
    assert match is not None
    assert (match.benchmark, match.item) == ("a", "copy")


@given(st.permutations(ITEMS))
@settings(max_examples=6, deadline=None)
def test_order_of_items_and_serialisation_change_nothing(items: list[EvalItem]):
    index = EvalIndex.build(items)
    assert index.to_bytes() == INDEX.to_bytes()
    copy = EvalIndex.from_bytes(index.to_bytes())
    assert copy.to_bytes() == INDEX.to_bytes()
    documents = [LONG, filler(30), f"x {MIDDLE} y", SHORT]
    assert contaminated(copy, documents) == contaminated(INDEX, documents)


@given(st.integers(0, 150), st.integers(0, 150), st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_found_at_any_place(before: int, after: int, which: int):
    match = contaminated(INDEX, [f"{filler(before)} {ITEMS[which].text} {filler(after, 2)}"])[0]
    assert match == Match(ITEMS[which].name, ITEMS[which].item, ITEMS[which].text.rstrip("?"), 1.0)


def test_fingerprints_cover_ids_and_texts():
    first = fingerprints(ITEMS)
    assert [(entry["name"], entry["items"]) for entry in first] == [("demo", 2), ("tiny", 1)]
    assert fingerprints(ITEMS[::-1]) == first == INDEX.sets
    changed = fingerprints([*ITEMS[:2], EvalItem("tiny", "short", SHORT + "?")])
    assert changed[0] == first[0]
    assert changed[1] != first[1]


def test_reading_items(tmp_path):
    lines = [{"id": "q1", "benchmark": "arc", "question": LONG, "choices": ["a"]}, {"text": SHORT}]
    data = "\n".join(json.dumps(line) for line in lines) + "\n"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.jsonl").write_text(data)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(data.encode()))
    (tmp_path / "other.txt").write_text("not items")
    expected = [EvalItem("arc", "q1", LONG), EvalItem("mine", "2", SHORT)]
    assert read_eval_items(str(tmp_path / "sub" / "mine.jsonl")) == expected
    assert read_eval_items(str(tmp_path / "sub" / "*.jsonl")) == expected
    assert read_eval_items(storage.store(tmp_path), ["sub/mine.jsonl"]) == expected
    assert len(read_eval_items(str(tmp_path))) == 4


@pytest.mark.parametrize(("content", "message"), [
    (b"{nope", "not valid JSON"), (b'{"id": 1}', "no text"), (b"[1]", "no text"), (b"\xff\xfe", "UTF-8"),
    (b"", "no evaluation items"),
])
def test_bad_items_are_told_with_their_place(tmp_path, content: bytes, message: str):
    (tmp_path / "items.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_eval_items(str(tmp_path / "items.jsonl"))
    assert "items.jsonl" in str(caught.value)
    with pytest.raises(InputError, match="no such file"):
        read_eval_items(str(tmp_path / "missing.jsonl"))


def test_small_n_is_refused():
    with pytest.raises(ValueError, match="at least 5"):
        EvalIndex.build(ITEMS, ngram=4)
    assert EvalIndex.build(ITEMS, ngram=5).lengths.tolist() == [5]
