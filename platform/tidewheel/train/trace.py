"""Trace the lineage of a run: the documents that a step read, and the recorded steps that read a document."""

from __future__ import annotations

from typing import Any

import numpy as np

from tidewheel import jsonlog
from tidewheel.errors import ShardError, StorageError
from tidewheel.shards.digest import sequence_digest
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.trace import SHOWN, document_lines, find_row, segments, token_lines, trace_document, trace_token
from tidewheel.storage import store
from tidewheel.train.record import positions, read_rollbacks, recorded_source

_POSITIONS = 1 << 20
"""Positions located at once."""


class _Run:
    """A run's record, with the open sets that it read."""

    def __init__(self, run_uri: str, uri: str | None) -> None:
        run_store = store(run_uri)
        if not run_store.exists("run.json"):
            raise StorageError("no run.json", where=run_uri, fix="give the folder of a run, such as runs/<id>")
        values = run_store.read_json("run.json")
        self.uri = run_store.uri
        self.source = recorded_source(values, uri, run_store)
        self.sets = [ShardSet.open(domain.uri, manifest=domain.manifest) for domain in self.source.domains]
        self.plan = positions(values, self.source, read_rollbacks(run_store))
        self.starts = [np.cumsum([0, *(shard.rows for shard in opened.manifest.shards)]) for opened in self.sets]
        self.lines = jsonlog.read(run_store, "batches.jsonl")
        self.records: dict[int, dict[str, Any]] = {int(line["step"]): line for line in self.lines}  # the last counts
        self.guards = [event["detail"] for event in jsonlog.read(run_store, "events.jsonl")
                       if event.get("kind") == "guard"]

    def attempts(self, step: int) -> list[dict[str, Any]]:
        """Return a record for each set of positions that `step` took, oldest first: more than one after a rollback."""
        return list({line.get("passed_over", 0): line for line in self.lines if int(line["step"]) == step}.values())

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (domain, row) at `positions`; rows count through all shards of the domain's set."""
        domains, shards, rows = self.source.locate(positions)
        for index, starts in enumerate(self.starts):
            in_domain = domains == index
            rows[in_domain] += starts[shards[in_domain]]
        return domains, rows


def trace_step(run_uri: str, step: int, *, batch_row: int | None = None, token: int | None = None,
               uri: str | None = None) -> dict[str, Any]:
    """Return the sequences of a step's global batch and their documents; with `token`, the origin of that token.

    Args:
        run_uri: the run.
        step: from 1.
        batch_row: only this sequence of the batch, counted from 0.
        token: index of a token in this sequence; needs `batch_row`.
        uri: where the run's shard set is now, if it was moved.

    Returns:
        {"run", "step", "digest", "as_recorded": the planned sequences give the recorded digest, "sequences":
        [{"batch_row", "set", "domain" ("" without a mixture), "row", "id", "segments"}], "token": `trace_token` or
        None, "guards": what guards noticed at this step, "before": [{"digest", "as_recorded", "sequences"}], what the
        step read before a rollback passed over it}.

    Raises:
        StorageError: there is no such run.
        ShardError: the step has no record, the batch no such row, or the set is not the run's.
    """
    run = _Run(run_uri, uri)
    if step not in run.records:
        raise ShardError(f"step {step} has no record", where=run_uri, fix=_steps_known(run.records))
    size = run.plan.count(step)
    if batch_row is not None and not 0 <= batch_row < size:
        raise ShardError(f"there is no row {batch_row} in the batch", where=f"{run_uri} step {step}",
                         fix=f"the rows of a global batch are numbered from 0 to {size - 1}")
    if token is not None and batch_row is None:
        raise ShardError("a token without its row in the batch", where=f"{run_uri} step {step}",
                         fix="give --batch-row as well")
    *before, last = [_reading(run, record, batch_row) for record in run.attempts(step)]
    sequence = last["sequences"][0]
    traced = None if token is None else trace_token(sequence["set"], sequence["row"], token)
    return {"run": run.uri, "step": step, **last, "token": traced, "before": before,
            "guards": [guard for guard in run.guards if guard.get("step") == step]}


def _reading(run: _Run, record: dict[str, Any], batch_row: int | None) -> dict[str, Any]:
    """Return what a recorded step read: "digest", "as_recorded" and "sequences" of `trace_step`."""
    taken = run.plan.known(record.get("passed_over", 0)).of(int(record["step"]))
    ids = run.source.ids_at(taken)
    locations = [part.tolist() for part in run.rows(taken)]
    sequences = []
    for number in range(len(taken)) if batch_row is None else [batch_row]:
        domain, row = locations[0][number], locations[1][number]
        opened = run.sets[domain]
        sequences.append({"batch_row": number, "set": opened.store.uri, "domain": run.source.domains[domain].name,
                          "row": row, "id": ids[number], "segments": segments(opened, *find_row(opened, row))})
    return {"digest": record["digest"], "as_recorded": sequence_digest(ids) == record["digest"],
            "sequences": sequences}


def trace_document_steps(run_uri: str, document: str, *, uri: str | None = None) -> dict[str, Any]:
    """Return `trace_document` of the run's set, and the recorded uses of the document.

    The uses are in "steps": [{"step", "batch_row", "epoch", "row"}]. For a mixture, "domain" names the domain that
    holds the document, the first by name if several do.

    Args:
        run_uri: the run.
        document: id of the document.
        uri: where the run's shard set is now, if it was moved.

    Raises:
        StorageError: there is no such run.
        ShardError: the document is not known, or the set is not the run's.
    """
    run = _Run(run_uri, uri)
    index, answer = _holder(run, document)
    total = run.sets[index].manifest.rows
    document_rows = np.unique(np.array([piece["row"] for piece in answer["pieces"]], dtype=np.int64))
    steps = np.array(sorted(run.records), dtype=np.int64)
    uses: list[dict[str, int]] = []
    chunk = max(1, _POSITIONS // run.plan.sizes.largest)
    for first in range(0, len(steps) if len(document_rows) else 0, chunk):
        part = steps[first:first + chunk]
        taken = run.plan.of_steps(part)
        owners = run.plan.steps(part)
        domains, rows = run.rows(taken)
        visits = run.source.visits(taken)[1]
        for hit in np.flatnonzero(np.isin(rows, document_rows) & (domains == index)).tolist():
            step = int(owners[hit])
            uses.append({"step": step, "batch_row": hit - int(np.searchsorted(owners, step)),
                         "epoch": int(visits[hit]) // total, "row": int(rows[hit])})
    return {"run": run.uri, "domain": run.source.domains[index].name, **answer, "recorded_steps": len(steps),
            "steps": uses}


def _holder(run: _Run, document: str) -> tuple[int, dict[str, Any]]:
    """Return the index of the domain that holds the document, and what its shard set says about the document.

    Without such a domain, return the first one that has a verdict on the document.
    """
    answers = []
    problem: ShardError | None = None
    for index, domain in enumerate(run.source.domains):
        try:
            answer = trace_document(domain.uri, document)
        except ShardError as error:
            problem = error
            continue
        answers.append((index, answer))
        if answer["pieces"]:
            return index, answer
    if not answers and problem is not None:
        raise problem
    return answers[0]


def _steps_known(records: dict[int, Any]) -> str:
    return (f"the run has records of steps {min(records)} to {max(records)}" if records
            else "the run has no record of a step yet")


def step_lines(answer: dict[str, Any]) -> list[str]:
    """Return the lines that show the result of `trace_step`."""
    fits = "as recorded" if answer["as_recorded"] else "NOT what was recorded: see `tidewheel audit`"
    lines = [f"step {answer['step']} read {answer['digest']}, {fits}", *_sequence_lines(answer["sequences"])]
    lines += token_lines(answer["token"]) if answer["token"] else []
    for reading in answer["before"]:
        lines += [f"before, and passed over since, it read {reading['digest']}", *_sequence_lines(reading["sequences"])]
    return lines + [f"guard: {guard_line(guard)}" for guard in answer["guards"]]


def guard_line(guard: dict[str, Any]) -> str:
    """Return the line that shows a guard's event."""
    shown = {"loss": "loss", "gradient_norm": "gradient norm", "loss_z": "z", "gradient_norm_z": "z of the norm"}
    values = [f"{name} {float(guard[key]):.4g}" for key, name in shown.items() if guard.get(key) is not None]
    end = guard["position"] + guard["count"] - 1
    return (f"{guard['reason']} at step {guard['step']} ({', '.join(values)}), positions {guard['position']} to {end}, "
            f"digest {guard['digest']}: {guard['action']}")


def _sequence_lines(sequences: list[dict[str, Any]]) -> list[str]:
    lines = []
    for sequence in sequences:
        lines.append(f"  {sequence['batch_row']}: row {sequence['row']} ({sequence['id']})")
        for segment in sequence["segments"]:
            end = segment["start"] + segment["tokens"] - 1
            lines.append(f"     tokens {segment['start']} to {end}: {segment['document']}, its from "
                         f"{segment['document_offset']}")
    return lines


def document_step_lines(answer: dict[str, Any]) -> list[str]:
    """Return the lines that show the result of `trace_document_steps`."""
    uses = answer["steps"]
    lines = [f"read in {len(uses)} places of {answer['recorded_steps']} recorded steps"]
    lines += [f"  step {use['step']} row {use['batch_row']} of the batch (epoch {use['epoch']}): row {use['row']}"
              for use in uses[:SHOWN]]
    return document_lines(answer) + lines + [f"  and {len(uses) - SHOWN} more"] * (len(uses) > SHOWN)
