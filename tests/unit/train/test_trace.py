"""Tests of a run's lineage: from a step to its documents and back."""

from __future__ import annotations

import json

import pytest

from tests.unit.shards.helpers import write_set
from tidewheel import storage
from tidewheel.errors import ShardError, StorageError
from tidewheel.shards.digest import sequence_digest
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.source import Source
from tidewheel.train import trace

SIZE = 4


@pytest.fixture
def run(tmp_path):
    """Record nine steps of 4 over 15 rows, more than two epochs, with step 3 twice, and return the folder."""
    manifest = write_set(tmp_path / "shards")
    base = storage.store(tmp_path / "run")
    base.write_json("run.json", {
        "config": {"batch": {"global_sequences": SIZE}, "data": {"seed": 5}},
        "data": {"shards": {"uri": str(tmp_path / "shards"), "hash": manifest.hash}}})
    source = Source.single(str(tmp_path / "shards"), manifest, 5)
    lines = [{"step": step, "digest": sequence_digest(source.ids((step - 1) * SIZE, SIZE))}
             for step in (1, 2, 3, 3, 4, 5, 6, 7, 8, 9)]
    base.write("batches.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    return tmp_path


def test_a_step_is_traced_to_its_documents(run):
    traced = trace.trace_step(str(run / "run"), 4)
    assert traced["as_recorded"]
    assert len(traced["sequences"]) == SIZE
    for sequence in traced["sequences"]:
        assert sequence["segments"][0]["document"] == f"d{sequence['row']}-0"
    traced_token = trace.trace_step(str(run / "run"), 4, batch_row=3, token=0)
    assert traced_token["sequences"] == [traced["sequences"][3]]
    assert traced_token["token"]["segment"] == traced_token["sequences"][0]["segments"][0]
    assert trace.step_lines(traced_token)[0].endswith("as recorded")


def test_a_document_is_traced_to_the_same_steps(run):
    rows = ShardSet.open(str(run / "shards")).manifest.rows
    uses = {(use["step"], use["batch_row"], row) for row in range(rows)
            for use in trace.trace_document_steps(str(run / "run"), f"d{row}-0")["steps"]}
    forward = {(step, sequence["batch_row"], sequence["row"]) for step in range(1, 10)
               for sequence in trace.trace_step(str(run / "run"), step)["sequences"]}
    assert uses == forward
    assert len(forward) == 9 * SIZE


def test_small_chunks_give_the_same_trace(run, monkeypatch):
    whole = trace.trace_document_steps(str(run / "run"), "d3-0")
    monkeypatch.setattr(trace, "_POSITIONS", 5)
    assert trace.trace_document_steps(str(run / "run"), "d3-0") == whole
    assert whole["recorded_steps"] == 9
    assert {use["epoch"] for use in whole["steps"]} >= {0, 1}
    assert "read in" in "\n".join(trace.document_step_lines(whole))


def test_a_changed_digest_is_reported(run):
    (run / "run/batches.jsonl").write_text('{"step": 1, "digest": "other"}\n')
    traced = trace.trace_step(str(run / "run"), 1)
    assert not traced["as_recorded"]
    assert "NOT" in trace.step_lines(traced)[0]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"step": 10}, "step 10 has no record"), ({"step": 0}, "step 0"), ({"step": 1, "batch_row": 4}, "no row 4"),
    ({"step": 1, "token": 4}, "without its row"), ({"step": 1, "batch_row": 0, "token": 99}, "no token 99")])
def test_unknown_steps_and_tokens_are_refused(run, arguments, message):
    with pytest.raises(ShardError, match=message) as error:
        trace.trace_step(str(run / "run"), **arguments)
    assert error.value.fix


def test_another_set_and_a_missing_run_are_refused(run):
    write_set(run / "other", rows=(15,))
    with pytest.raises(ShardError, match="not the data"):
        trace.trace_step(str(run / "run"), 1, uri=str(run / "other"))
    with pytest.raises(StorageError, match=r"no run\.json"):
        trace.trace_step(str(run / "nowhere"), 1)
