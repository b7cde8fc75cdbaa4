"""Tests of preference pairs as rows, with equal prompts and whole answers, and of the verification of their sets."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from tests.unit.data.tokenize.test_chat import CHATML, MARKED, SPECIAL, TEXTS, template
from tidewheel import storage
from tidewheel.data.tokenize.preferences import REFUSED, TOO_LONG, encode_pairs
from tidewheel.data.tokenize.tokenizer import train_bpe
from tidewheel.errors import ShardError
from tidewheel.shards.format import preference_schema, write_shard
from tidewheel.shards.manifest import Manifest, write_manifest
from tidewheel.shards.pairs import open_set
from tidewheel.shards.preferences import read_pairs
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.tokenizer import Encoder, load
from tidewheel.shards.trace import trace_document
from tidewheel.shards.verify import inspect, verify


def pair(number: int, words: int = 3):
    return ([{"role": "system", "content": "be"}, {"role": "user", "content": f"ask {number}"}],
            [{"role": "assistant", "content": f"good {number} " * words}],
            [{"role": "assistant", "content": "世 bad"}])


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load(train_bpe(TEXTS, 600, SPECIAL))


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_rows_contain_both_conversations(encoder, source):
    pairs = [pair(number) for number in range(5)]
    encoded = encode_pairs(encoder, template(encoder, source), [f"p{n}" for n in range(5)], pairs, sequence_length=200,
                         token_dtype="uint16")
    assert not encoded.dropped
    assert encoded.table.schema == preference_schema("uint16")
    decode = encoder.with_control_tokens.decode
    for row, (prompt, chosen, rejected) in zip(encoded.table.to_pylist(), pairs, strict=True):
        begin = row["prompt_length"]
        assert row["chosen"][:begin] == row["rejected"][:begin]
        assert decode(row["chosen"][:begin], skip_special_tokens=False).endswith(
            f"{prompt[1]['content']}<|im_end|>\n<|im_start|>assistant\n")
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            text = decode(row[name][begin:], skip_special_tokens=False)
            assert text == answer[0]["content"] + "<|im_end|>"


def test_margins_stay_with_their_pairs(encoder, tmp_path):
    pairs = [pair(0), pair(1, words=400), pair(2)]
    encoded = encode_pairs(encoder, template(encoder, CHATML), list("abc"), pairs, sequence_length=60,
                         token_dtype="uint16", margins=[0.5, 1.5, 2.5])
    assert encoded.table.schema == preference_schema("uint16", margins=True)
    assert encoded.table["margin"].to_pylist() == [0.5, 2.5]
    write_set(tmp_path, encoder, encoded.table, margins=True, sequence_length=60)
    assert verify(str(tmp_path)) == []
    assert inspect(str(tmp_path), row=1)["margin"] == 2.5
    rows = open_set(str(tmp_path)).rows(np.array([0, 0]), np.array([1, 0]))
    assert rows.margins is not None
    assert rows.margins.tolist() == [2.5, 0.5]
    write_set(tmp_path, encoder, encoded.table, sequence_length=60)
    opened = open_set(str(tmp_path))
    with pytest.raises(ShardError, match="columns or rows are not those of its manifest"):
        opened.rows(np.array([0]), np.array([0]))


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_a_single_answer_stands_beside_its_prompt(encoder, tmp_path, source):
    whole = [pair(number) for number in range(3)]
    single = [(whole[0][0], whole[0][1], []), (whole[1][0], [], whole[1][2]), (whole[2][0], whole[2][1], [])]
    paired, encoded = (encode_pairs(encoder, template(encoder, source), list("abc"), pairs, sequence_length=60,
                                    token_dtype="uint16").table.to_pylist() for pairs in (whole, single))
    for index, (row, both) in enumerate(zip(encoded, paired, strict=True)):
        kept, other = ("rejected", "chosen") if index == 1 else ("chosen", "rejected")
        assert row[kept] == both[kept]
        assert row[other] == row[kept][:row["prompt_length"]]
        assert 0 < row["prompt_length"] < len(row[kept])
    write_set(tmp_path, encoder, pa.Table.from_pylist(encoded, schema=preference_schema("uint16")), unpaired=True)
    assert verify(str(tmp_path)) == []
    rows = open_set(str(tmp_path), parts=3).rows(np.zeros(3, dtype=np.int64), np.arange(3))
    assert rows.desirable is not None
    assert (rows.desirable.tolist(), rows.parts, rows.answers) == ([True, False, True], 2, 1)
    row, before = encoded[2], encoded[1]
    mismatched = row["chosen"][:row["prompt_length"]] + before["rejected"][before["prompt_length"]:]
    real = rows.segment_ids.reshape(3, 2, -1)[2, 1] >= 0
    assert rows.tokens.reshape(3, 2, -1)[2, 1][real].tolist() == mismatched
    write_set(tmp_path, encoder, pa.Table.from_pylist(paired, schema=preference_schema("uint16")), unpaired=True)
    assert any("has two answers" in problem for problem in verify(str(tmp_path)))


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_labels_stand_at_the_ends_of_steps(encoder, tmp_path, source):
    steps = [["good 1\n", "bad 2\n", "世 good"], ["ask"]]
    labels = [[True, False, True], [False]]
    pairs, given = [], []
    for texts, right in zip(steps, labels):
        pairs.append((pair(0)[0], [{"role": "assistant", "content": "".join(texts)}], []))
        given.append([(len("".join(texts[:index + 1])), label) for index, label in enumerate(right)])
    encoded = encode_pairs(encoder, template(encoder, source), list("ab"), pairs, sequence_length=60,
                           token_dtype="uint16", steps=given)
    decode = encoder.with_control_tokens.decode
    for row, texts, right in zip(encoded.table.to_pylist(), steps, labels, strict=True):
        answer = row["chosen"][row["prompt_length"]:]
        ends = [index for index, label in enumerate(row["step_labels"]) if label >= 0]
        assert [bool(row["step_labels"][index]) for index in ends] == right
        assert [decode(answer[:index + 1]) for index in ends[:-1]] == ["".join(texts[:number + 1])
                                                                      for number in range(len(texts) - 1)]
        assert ends[-1] == len(answer) - 1
    write_set(tmp_path, encoder, encoded.table, unpaired=True, step_labels=True, sequence_length=60)
    assert verify(str(tmp_path)) == []
    assert inspect(str(tmp_path), row=1)["step_labels"] == encoded.table["step_labels"][1].as_py()
    rows = open_set(str(tmp_path)).rows(np.zeros(2, dtype=np.int64), np.array([1, 0]))
    assert rows.step_labels is not None
    for labels_of_row, row in zip(rows.step_labels, reversed(encoded.table.to_pylist())):
        whole = [-1] * row["prompt_length"] + row["step_labels"]
        assert labels_of_row.tolist() == whole + [-1] * (60 - len(whole))
    wrong = encoded.table.set_column(4, "step_labels", pa.array([[2], [0, 1]], pa.list_(pa.int8())))
    write_set(tmp_path, encoder, wrong, unpaired=True, step_labels=True, sequence_length=60)
    assert any("not one label" in problem for problem in verify(str(tmp_path)))
    with pytest.raises(ShardError, match="not one label, -1, 0 or 1"):
        open_set(str(tmp_path)).rows(np.array([0]), np.array([0]))
    changing = template(encoder, CHATML.replace("m['content']", "m['content'] | upper"))
    [(reason, detail)] = encode_pairs(encoder, changing, ["a"], pairs[:1], sequence_length=60, token_dtype="uint16",
                                      steps=given[:1]).dropped.values()
    assert (reason, "changes the text of the answer" in detail) == (REFUSED, True)


def test_long_and_refused_pairs_are_dropped_with_a_reason(encoder):
    source = "{% if messages[0].content == 'be' and messages[1].content == 'ask 1' %}{{ raise_exception('no') }}" \
             "{% endif %}" + CHATML
    pairs = [pair(0), pair(1), pair(2, words=400), pair(3)]
    encoded = encode_pairs(encoder, template(encoder, source), list("abcd"), pairs, sequence_length=60,
                         token_dtype="uint32")
    assert encoded.table["document_id"].to_pylist() == ["a", "d"]
    assert {number: reason for number, (reason, _) in encoded.dropped.items()} == {1: REFUSED, 2: TOO_LONG}
    assert "a row has 60" in encoded.dropped[2][1]


def write_set(folder, encoder: Encoder, table: pa.Table | None = None, **changes) -> None:
    folder_store = storage.store(folder)
    if table is None:
        table = encode_pairs(encoder, template(encoder, CHATML), [f"p{n}" for n in range(9)],
                             [pair(n) for n in range(9)], sequence_length=200, token_dtype="uint16").table
    shards = tuple(write_shard(folder_store, table.slice(first, 5)) for first in range(0, len(table), 5))
    stamp = folder_store.write("tokenizer.json", encoder.data)
    write_manifest(folder_store, Manifest(**{
        "sequence_length": 200, "token_dtype": "uint16", "vocabulary_size": encoder.padded_size, "documents": 9,
        "tokenizer": encoder.manifest(stamp.hash), "recipe_hash": "r", "evaluation_sets": (), "shards": shards,
        "kind": "preferences", **changes}))


def test_a_set_is_written_verified_inspected_and_traced(encoder, tmp_path):
    write_set(tmp_path, encoder)
    assert verify(str(tmp_path)) == []
    assert sum(batch.num_rows for batch in read_pairs(str(tmp_path))) == 9
    seen = inspect(str(tmp_path), row=7)
    assert (seen["document"], seen["row"]) == ("p7", 7)
    assert inspect(str(tmp_path))["kind"] == "preferences"
    assert [piece["row"] for piece in trace_document(str(tmp_path), "p6")["pieces"]] == [6]
    with pytest.raises(ShardError, match="pairs, not packed sequences"):
        ShardSet.open(str(tmp_path))
    with pytest.raises(ShardError, match="no row 9"):
        inspect(str(tmp_path), row=9)


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt_length": 3, "chosen": [1, 2, 3], "rejected": [1, 2, 3, 4]}, "not shorter than its sequence"),
    ({"prompt_length": -1, "chosen": [1], "rejected": [2]}, "not shorter than its sequence"),
    ({"prompt_length": 2, "chosen": [1, 2, 3], "rejected": [1, 5, 3]}, "different prompts"),
    ({"prompt_length": 0, "chosen": [60_000], "rejected": [2]}, "outside the vocabulary"),
    ({"prompt_length": 0, "chosen": [1] * 201, "rejected": [2]}, "201 tokens, at most 200 are allowed"),
])
def test_verify_reports_wrong_rows(encoder, tmp_path, row, message):
    good = {"document_id": "g", "prompt_length": 1, "chosen": [1, 2], "rejected": [1, 3, 4]}
    table = pa.Table.from_pylist([good, {"document_id": "x", **row}], schema=preference_schema("uint16"))
    write_set(tmp_path, encoder, table)
    assert any(message in problem for problem in verify(str(tmp_path)))


def test_verify_reports_a_damaged_shard(encoder, tmp_path):
    write_set(tmp_path, encoder)
    name = json.loads((tmp_path / "manifest.json").read_text())["shards"][1]["name"]
    data = np.fromfile(tmp_path / name, np.uint8)
    data[len(data) // 2] ^= 1
    data.tofile(tmp_path / name)
    assert len(verify(str(tmp_path))) == 1
    with pytest.raises(ShardError, match="hash differs"):
        list(read_pairs(str(tmp_path)))
