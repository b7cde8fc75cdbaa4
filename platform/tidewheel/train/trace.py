"""Lineage of a run: which documents a step read, and which of the recorded steps read a document."""

from __future__ import annotations

from typing import Any

import numpy as np

from tidewheel import jsonlog
from tidewheel.errors import ShardError, StorageError
from tidewheel.shards.digest import sequence_digest
from tidewheel.shards.order import Order, batch_ids
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.trace import SHOWN, document_lines, find_row, segments, token_lines, trace_document, trace_token
from tidewheel.storage import store

_POSITIONS = 1 << 20
"""Positions located at once."""


class _Run:
    """A run's record, opened with the set it read."""

    def __init__(self, run_uri: str, uri: str | None) -> None:
        place = store(run_uri)
        if not place.exists("run.json"):
            raise StorageError("no run.json", where=run_uri, mend="give the folder of a run, such as runs/<id>")
        values = place.read_json("run.json")
        shards = values["data"]["shards"]
        self.uri, self.set_uri = place.uri, uri or shards["uri"]
        self.shard_set = ShardSet.open(self.set_uri)
        self.manifest = self.shard_set.manifest
        if self.manifest.hash != shards["hash"]:
            raise ShardError("this is not the shard set that the run read", where=self.set_uri,
                             mend="give the original set; a copy of it elsewhere will do")
        self.size = int(values["config"]["batch"]["global_sequences"])
        self.order = Order([shard.rows for shard in self.manifest.shards], values["config"]["data"]["seed"])
        self.starts = np.cumsum([0, *(shard.rows for shard in self.manifest.shards)])
        records = jsonlog.read(place, "batches.jsonl")
        self.records: dict[int, dict[str, Any]] = {int(record["step"]): record for record in records}  # the last counts

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Rows, counted through all shards, at `positions`."""
        shards, rows = self.order.locate(positions)
        return self.starts[shards] + rows


def trace_step(run_uri: str, step: int, *, batch_row: int | None = None, token: int | None = None,
               uri: str | None = None) -> dict[str, Any]:
    """The sequences of a step's global batch and their documents; with `token`, where that token came from.

    Args:
        run_uri: the run.
        step: from 1.
        batch_row: only this sequence of the batch, from 0.
        token: of this sequence; needs `batch_row`.
        uri: where the run's shard set is now, if not where run.json says.

    Returns:
        {"run", "set", "step", "digest", "as_recorded": the planned sequences give the recorded digest, "sequences":
        [{"batch_row", "row", "id", "segments"}], "token": `trace_token` or None}.

    Raises:
        StorageError: there is no such run.
        ShardError: the step has no record, the batch no such row, or the set is not the run's.
    """
    run = _Run(run_uri, uri)
    if step not in run.records:
        raise ShardError(f"step {step} has no record", where=run_uri, mend=_steps_known(run.records))
    if batch_row is not None and not 0 <= batch_row < run.size:
        raise ShardError(f"there is no row {batch_row} in the batch", where=f"{run_uri} step {step}",
                         mend=f"the rows of a global batch count from 0 to {run.size - 1}")
    if token is not None and batch_row is None:
        raise ShardError("a token without its row in the batch", where=f"{run_uri} step {step}",
                         mend="give --batch-row as well")
    start = (step - 1) * run.size
    ids = batch_ids(run.order, run.manifest, start, run.size)
    rows = run.rows(np.arange(start, start + run.size))
    chosen = range(run.size) if batch_row is None else [batch_row]
    sequences = [{"batch_row": number, "row": int(rows[number]), "id": ids[number],
                  "segments": segments(run.shard_set, *find_row(run.shard_set, int(rows[number])))}
                 for number in chosen]
    traced = None if token is None or batch_row is None else trace_token(run.set_uri, int(rows[batch_row]), token)
    digest = run.records[step]["digest"]
    return {"run": run.uri, "set": run.shard_set.store.uri, "step": step, "digest": digest,
            "as_recorded": sequence_digest(ids) == digest, "sequences": sequences, "token": traced}


def trace_document_steps(run_uri: str, document: str, *, uri: str | None = None) -> dict[str, Any]:
    """`trace_document` in the run's set, and "steps": [{"step", "batch_row", "epoch", "row"}], the uses recorded.

    Raises:
        StorageError: there is no such run.
        ShardError: the document is not known, or the set is not the run's.
    """
    run = _Run(run_uri, uri)
    found = trace_document(run.set_uri, document)
    wanted = np.unique(np.array([piece["row"] for piece in found["pieces"]], dtype=np.int64))
    steps = np.array(sorted(run.records), dtype=np.int64)
    uses: list[dict[str, int]] = []
    chunk = max(1, _POSITIONS // run.size)
    for first in range(0, len(steps) if len(wanted) else 0, chunk):
        positions = ((steps[first:first + chunk, None] - 1) * run.size + np.arange(run.size)).ravel()
        rows = run.rows(positions)
        for hit in np.flatnonzero(np.isin(rows, wanted)).tolist():
            position = int(positions[hit])
            uses.append({"step": position // run.size + 1, "batch_row": position % run.size,
                         "epoch": position // run.manifest.rows, "row": int(rows[hit])})
    return {"run": run.uri, **found, "recorded_steps": len(steps), "steps": uses}


def _steps_known(records: dict[int, Any]) -> str:
    return (f"recorded are steps {min(records)} to {max(records)}" if records
            else "the run has recorded no step yet")


def step_lines(found: dict[str, Any]) -> list[str]:
    """`trace_step` for people."""
    fits = "as recorded" if found["as_recorded"] else "NOT what was recorded: see `tidewheel audit`"
    lines = [f"step {found['step']} read {found['digest']}, {fits}"]
    for sequence in found["sequences"]:
        lines.append(f"  {sequence['batch_row']}: row {sequence['row']} ({sequence['id']})")
        lines += [f"     tokens {each['start']} to {each['start'] + each['tokens'] - 1}: {each['document']}, its from "
                  f"{each['document_offset']}" for each in sequence["segments"]]
    return lines + (token_lines(found["token"]) if found["token"] else [])


def document_step_lines(found: dict[str, Any]) -> list[str]:
    """`trace_document_steps` for people."""
    uses = found["steps"]
    lines = [f"read in {len(uses)} places of {found['recorded_steps']} recorded steps"]
    lines += [f"  step {use['step']} row {use['batch_row']} of the batch (epoch {use['epoch']}): row {use['row']}"
              for use in uses[:SHOWN]]
    return document_lines(found) + lines + [f"  and {len(uses) - SHOWN} more"] * (len(uses) > SHOWN)
