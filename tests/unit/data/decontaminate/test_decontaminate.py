"""Planted items are found in differently formatted texts, and similar texts are not."""

import gzip
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel import storage
from tidewheel.data.decontaminate import EvalIndex, EvalItem, contaminated, find, fingerprints, read_eval_items
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
AROUND = " ".join(f"{word} zinc" for word in ["quartz", "marble", "granite", "basalt", "slate"] * 4)


def filler(count: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=count))


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.item)
@pytest.mark.parametrize("reformat", [
    str, str.upper, lambda t: t.replace(" ", "\n  "), lambda t: t.replace(",", "").replace("?", "!"),
    lambda t: t.replace("e", "é"),
])
def test_whole_items_are_found_in_other_formatting(item: EvalItem, reformat):
    planted = reformat(item.text)
    document = f"{filler(300)} {planted} {filler(200, 1)}"
    match = contaminated(INDEX, [filler(50), document])[1]
    assert match is not None
    assert (match.benchmark, match.item, match.score) == (item.name, item.item, 1.0)
    assert match.text == planted.rstrip("?!")


def test_clean_documents_and_an_empty_index_have_no_matches():
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
    assert contaminated(INDEX, [SHORT.replace("sleep", "rest")]) == [None]  # short items match only as a whole


def test_pieces_scattered_over_a_long_document_do_not_add_up():
    words = LONG.split()
    pieces = [" ".join(words[i : i + 13]) for i in range(0, len(words) - 13, 13)]
    assert contaminated(INDEX, [" ".join(pieces)])[0] is not None
    assert contaminated(INDEX, [filler(200).join(pieces)]) == [None]


def test_stock_phrases_do_not_count():
    stock = "which of the following is a true statement"
    items = [EvalItem("stock", str(number), f"{stock} {filler(3, number)}") for number in range(200)]
    index = EvalIndex.build(items)
    assert contaminated(index, [f"{AROUND} {stock} {AROUND}"]) == [None]
    match = contaminated(index, [f"{filler(50, 999)} {items[7].text} and more"])[0]
    assert match is not None
    assert (match.item, match.score) == ("7", 1.0)
    alone = EvalIndex.build([EvalItem("stock", "0", f"{stock} bordan")])
    assert contaminated(alone, [f"{AROUND} {stock} {AROUND}"])[0] is not None  # rare in this index, so it counts


def test_half_of_a_template_is_found():
    template = "a row of objects stands on the shelf and every one of them has a colour of its own , say which is"
    items = [EvalItem("shelf", str(number), f"{template} {filler(16, number)}") for number in range(100)]
    match = contaminated(EvalIndex.build(items), [f"{AROUND} {template} {AROUND}"])[0]
    assert match is not None
    assert match.text == template
    phrase = " ".join(template.split()[:6])
    assert contaminated(EvalIndex.build(items), [f"{AROUND} {phrase} {AROUND}"]) == [None]


@pytest.mark.parametrize("reformat", [
    lambda t: json.dumps({"q": t}), lambda t: t.replace("'", ""), lambda t: t.replace("'", " "),
    lambda t: t.replace("'", "&#39;").replace('"', "&quot;"), lambda t: t.replace("-", "").replace(".", ""),
])
def test_items_with_other_word_boundaries_are_found(reformat):
    text = "It's Dana's turn:\nwhy won't the \"well-known\" U.S. team's coach\ntell the players' wives?"
    index = EvalIndex.build([EvalItem("b", "1", text)])
    match = contaminated(index, [f"{filler(40)} {reformat(text)} {filler(40, 1)}"])[0]
    assert match is not None
    assert match.score > 0.7


@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from(["change", "drop", "add", "swap"]))
@settings(max_examples=60, deadline=None)
def test_an_item_with_a_few_changed_words_is_found(seed: int, edits: int, kind: str):
    draw = random.Random(seed)
    words = MIDDLE.split()
    for _ in range(edits):
        at = draw.randrange(len(words) - 1)
        if kind == "change":
            words[at] = "xylophone"
        elif kind == "drop":
            del words[at]
        elif kind == "add":
            words.insert(at, "xylophone")
        else:
            words[at], words[at + 1] = words[at + 1], words[at]
    match = contaminated(INDEX, [f"{filler(30, seed)} {' '.join(words)} {filler(30, seed + 1)}"])[0]
    assert match is not None
    assert match.item == "middle"


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_shuffled_words_do_not_match(seed: int):
    words = LONG.split()
    random.Random(seed).shuffle(words)
    assert contaminated(INDEX, [" ".join(words)]) == [None]


def test_long_answers_match_without_their_question_and_short_ones_do_not():
    long = "first take away the crates that stay in Alder , then a quarter of what remains , so thirty are left over"
    items = [EvalItem("a", "1", MIDDLE, long), EvalItem("a", "2", LONG, "it was a small town in Bohemia")]
    index = EvalIndex.build(items)
    assert [match.item for match in find(index, [f"{filler(20)} {long} {filler(20)}"])[0]] == ["1"]
    assert find(index, [f"{filler(20)} {items[1].answer} {filler(20)}"]) == [[]]
    assert find(index, [f"{filler(20)} {' '.join(long.split()[:12])} {filler(20)}"]) == [[]]  # half of an answer


def test_all_matches_are_returned_by_position():
    document = f"{MIDDLE} {filler(40)} {SHORT} {filler(40, 1)} {MIDDLE}"
    matches = find(INDEX, [document])[0]
    assert [match.item for match in matches] == ["middle", "short", "middle"]
    raw = document.encode()
    assert all(raw[match.start : match.end].decode() == match.text for match in matches)


def test_numbers_and_very_short_items_are_not_evidence():
    items = [EvalItem("n", "matrix", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"), EvalItem("n", "word", "forks")]
    assert contaminated(EvalIndex.build(items), ["1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 forks and knives"]) == [None]


def test_formulas_match_only_exactly():
    index = EvalIndex.build([EvalItem("sums", "1", "((-2 * -8 * 9 + -5) + (7 - -1 - -4 - 1)) =")])
    match, other = contaminated(index, ["So ((-2*-8*9 + -5) +\n(7 - -1 - -4 - 1)) = 149.", "2, 8, 9, 5, 7, 1, 4, 1"])
    assert match is not None
    assert (match.item, match.text) == ("1", "2*-8*9 + -5) +\n(7 - -1 - -4 - 1")
    assert other is None


def test_the_best_item_is_reported_and_ties_go_to_the_first_by_name():
    both = EvalIndex.build([*ITEMS, EvalItem("a", "copy", MIDDLE)])
    match = contaminated(both, [f"{LONG[: len(LONG) // 2]} {MIDDLE}"])[0]
    assert match is not None
    assert (match.benchmark, match.item) == ("a", "copy")


@given(st.permutations(ITEMS))
@settings(max_examples=6, deadline=None)
def test_the_index_does_not_depend_on_the_order_of_items_or_serialisation(items: list[EvalItem]):
    index = EvalIndex.build(items)
    assert index.to_bytes() == INDEX.to_bytes()
    copy = EvalIndex.from_bytes(index.to_bytes())
    assert copy.to_bytes() == INDEX.to_bytes()
    documents = [LONG, filler(30), f"x {MIDDLE} y", SHORT]
    assert contaminated(copy, documents) == contaminated(INDEX, documents)


@given(st.integers(0, 150), st.integers(0, 150), st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_items_are_found_at_any_position(before: int, after: int, which: int):
    match = contaminated(INDEX, [f"{filler(before)} {ITEMS[which].text} {filler(after, 2)}"])[0]
    assert match is not None
    item = ITEMS[which]
    assert (match.benchmark, match.item, match.text, match.score) == (item.name, item.item, item.text.rstrip("?"), 1.0)


def test_fingerprints_cover_ids_and_texts():
    first = fingerprints(ITEMS)
    assert [(entry["name"], entry["items"]) for entry in first] == [("demo", 2), ("tiny", 1)]
    assert fingerprints(ITEMS[::-1]) == first == INDEX.sets
    changed = fingerprints([*ITEMS[:2], EvalItem("tiny", "short", SHORT + "?")])
    assert changed[0] == first[0]
    assert changed[1] != first[1]


def test_items_are_read_from_files_folders_patterns_and_stores(tmp_path):
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


@pytest.mark.parametrize(("line", "text", "answer"), [
    ({"context": "A passage.", "question": "And a question?", "answer": "yes"}, "A passage.\nAnd a question?", "yes"),
    ({"question": "One?", "choices": ["a", "b"], "answer": 1}, "One?", "b"),
    ({"question": "One?", "choices": ["a"], "answer": 7}, "One?", ""),
    ({"prompt": "One?", "answers": ["short", "the longest", None]}, "One?", "the longest"),
    ({"problem": "One?", "solution": "so", "id": None}, "One?", "so"),
])
def test_item_fields_become_text_and_answer(tmp_path, line: dict, text: str, answer: str):
    (tmp_path / "set.jsonl").write_text(json.dumps(line) + "\n")
    assert read_eval_items(str(tmp_path)) == [EvalItem("set", "1", text, answer)]


@pytest.mark.parametrize(("content", "message"), [
    (b"{nope", "not valid JSON"), (b'{"id": 1}', "no text"), (b"[1]", "no text"), (b"\xff\xfe", "UTF-8"),
    (b"", "no evaluation items"),
])
def test_errors_in_items_name_the_file(tmp_path, content: bytes, message: str):
    (tmp_path / "items.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_eval_items(str(tmp_path / "items.jsonl"))
    assert "items.jsonl" in str(caught.value)
    with pytest.raises(InputError, match="no such file"):
        read_eval_items(str(tmp_path / "missing.jsonl"))
