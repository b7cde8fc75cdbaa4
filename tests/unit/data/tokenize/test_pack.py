"""Packing keeps every token, fills rows well and is deterministic."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.data.tokenize.pack import pack, utilisation

LENGTHS = st.lists(st.integers(0, 40), max_size=30)


def documents(lengths: list[int]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return documents whose tokens all differ, so that a misplaced token is detected."""
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]).astype(np.int64)
    return [f"doc-{i}" for i in range(len(lengths))], np.arange(10, 10 + offsets[-1], dtype=np.uint32), offsets


def reassemble(table: pa.Table) -> dict[str, dict[int, list[int]]]:
    """Return {document id: {offset: tokens}} from the rows, and check each row's invariants."""
    pieces_of: dict[str, dict[int, list[int]]] = {}
    for row in table.to_pylist():
        starts, length = row["segment_starts"], row["length"]
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        assert starts[-1] < length
        assert len(starts) == len(row["document_ids"]) == len(row["document_offsets"])
        assert set(row["tokens"][length:]) <= {1}
        for begin, end, name, offset in zip(starts, [*starts[1:], length], row["document_ids"],
                                            row["document_offsets"], strict=True):
            assert offset not in pieces_of.setdefault(name, {})
            pieces_of[name][offset] = row["tokens"][begin:end]
    return pieces_of


@given(LENGTHS, st.integers(1, 33), st.sampled_from(["uint16", "uint32"]), st.sampled_from([1, 3, 1 << 20]))
@settings(max_examples=80, deadline=None)
def test_reassembled_rows_equal_the_documents(lengths: list[int], sequence_length: int, dtype: str, window: int):
    ids, tokens, offsets = documents(lengths)
    table = pack(ids, tokens, offsets, sequence_length=sequence_length, token_dtype=dtype, pad_id=1, window=window)
    table.validate(full=True)
    pieces_of = reassemble(table)
    for number, name in enumerate(ids):
        pieces = pieces_of.pop(name, {})
        joined = [token for offset in sorted(pieces) for token in pieces[offset]]
        assert joined == tokens[offsets[number] : offsets[number + 1]].tolist()
        assert sorted(pieces) == list(range(0, lengths[number], sequence_length))  # only long documents are cut
    assert not pieces_of
    assert int(np.sum(table["length"].to_numpy())) == len(tokens)
    again = pack(ids, tokens, offsets, sequence_length=sequence_length, token_dtype=dtype, pad_id=1, window=window)
    assert again.equals(table)


def slow_best_fit(lengths: list[int], capacity: int) -> int:
    """Return the number of rows that best-fit-decreasing needs, by examining every row."""
    room: list[int] = []
    for length in sorted((n % capacity for n in lengths), reverse=True):
        fits = [row for row, free in enumerate(room) if free >= length]
        if not length:
            continue
        if fits:
            room[min(fits, key=room.__getitem__)] -= length
        else:
            room.append(capacity - length)
    return len(room) + sum(n // capacity for n in lengths)


@given(st.lists(st.integers(0, 9000), max_size=60), st.sampled_from([64, 65, 1000, 4096, 4097]))
@settings(max_examples=50, deadline=None)
def test_pack_needs_as_many_rows_as_best_fit_decreasing(lengths: list[int], capacity: int):
    ids, tokens, offsets = documents(lengths)
    table = pack(ids, tokens, offsets, sequence_length=capacity, token_dtype="uint32", pad_id=1)
    assert len(table) == slow_best_fit(lengths, capacity)


def test_rows_are_sorted_by_their_first_document_and_well_filled():
    generator = np.random.default_rng(0)
    ids, tokens, offsets = documents(np.minimum(generator.lognormal(5, 1.2, 5000), 5000).astype(int).tolist())
    table = pack(ids, tokens, offsets, sequence_length=2048, token_dtype="uint32", pad_id=1)
    assert utilisation(table) > 0.995
    firsts = [int(names[0].removeprefix("doc-")) for names in table["document_ids"].to_pylist()]
    assert firsts == sorted(firsts)


def test_no_documents_give_no_rows():
    table = pack([], np.zeros(0, np.uint32), np.zeros(1, np.int64), sequence_length=8, token_dtype="uint16", pad_id=0)
    assert len(table) == 0
    assert utilisation(table) == 1.0


@pytest.mark.parametrize(("change", "message"), [
    ({"token_dtype": "int8"}, "uint16 or uint32"),
    ({"sequence_length": 0}, "at least 1"),
    ({"offsets": np.array([0, 2])}, "offsets must rise"),
    ({"tokens": np.array([1, 2, 70000])}, "do not fit uint16"),
    ({"pad_id": 70000}, "do not fit uint16"),
    ({"method": "greedy"}, "best_fit, concatenate"),
    ({"loss_mask": np.zeros(2, np.uint8)}, "loss_mask has 2 values for 3 tokens"),
])
def test_pack_refuses_wrong_input(change: dict, message: str):
    good = {"ids": ["a"], "tokens": np.array([1, 2, 3]), "offsets": np.array([0, 3]), "sequence_length": 4,
            "token_dtype": "uint16", "pad_id": 0}
    with pytest.raises(ValueError, match=message):
        pack(**good | change)


@given(LENGTHS, st.integers(1, 33))
@settings(max_examples=60, deadline=None)
def test_concatenate_cuts_one_stream_into_rows(lengths: list[int], sequence_length: int):
    ids, tokens, offsets = documents(lengths)
    table = pack(ids, tokens, offsets, sequence_length=sequence_length, token_dtype="uint32", pad_id=1,
                 method="concatenate")
    table.validate(full=True)
    stream = [token for row in table.to_pylist() for token in row["tokens"][: row["length"]]]
    assert stream == tokens.tolist()
    assert all(row["length"] == sequence_length for row in table.to_pylist()[:-1])
    pieces_of = reassemble(table)
    for number, name in enumerate(ids):
        pieces = pieces_of.pop(name, {})
        assert [token for offset in sorted(pieces) for token in pieces[offset]] == (
            tokens[offsets[number] : offsets[number + 1]].tolist())
    assert not pieces_of


@given(LENGTHS, st.integers(1, 33), st.sampled_from(["best_fit", "concatenate"]))
@settings(max_examples=60, deadline=None)
def test_a_loss_mask_is_packed_like_its_tokens(lengths: list[int], sequence_length: int, method: str):
    ids, tokens, offsets = documents(lengths)
    mask = (tokens % 3 == 0).astype(np.uint8)
    options = {"sequence_length": sequence_length, "token_dtype": "uint32", "pad_id": 1, "method": method}
    table = pack(ids, tokens, offsets, loss_mask=mask, **options)
    assert table.drop_columns("loss_mask").equals(pack(ids, tokens, offsets, **options))
    for row in table.to_pylist():
        expected = [int(token % 3 == 0) for token in row["tokens"][: row["length"]]]
        assert row["loss_mask"] == expected + [0] * (sequence_length - row["length"])
