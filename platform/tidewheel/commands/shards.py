"""`tidewheel shards`: inspect packed shards, verify them, trace a token."""

from __future__ import annotations

import json
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from tidewheel.commands.options import AsJson
from tidewheel.errors import ShardError
from tidewheel.printable import printable

app = cyclopts.App(name="shards", help="Inspect and verify packed shards, and trace lineage.")


@app.command
def inspect(
    uri: Annotated[str, Parameter(help="A shard set: the folder that holds manifest.json.")],
    *,
    row: Annotated[int | None, Parameter(help="Show this row of the set, from 0, with all of its text.")] = None,
    limit: Annotated[int | None, Parameter(help="Rows to show; default: 3, with --row that one.")] = None,
    source: Annotated[str | None, Parameter(help="Show rows that hold a document of this source.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show a shard set's contents, and some rows as text: segments, their documents and the loss mask."""
    from itertools import islice

    from tidewheel.commands.shard_rows import print_rows, print_summary
    from tidewheel.shards import show
    from tidewheel.shards.verify import inspect as look

    if limit is not None and limit < 0:
        raise ShardError(f"{limit} rows cannot be shown", where="--limit", fix="give 0 or more")
    count = limit if limit is not None else 3 if row is None else 1
    summary = look(uri, row=row)
    shown_rows = list(islice(show.rows(uri, first=row or 0, source=source), count)) if count and (
        row is not None or summary["rows"]) else []
    if as_json:
        rows = [shown_row.canonical() for shown_row in shown_rows]
        plain = row is not None and limit is None and source is None
        print(json.dumps({**summary, **rows[0]} if plain else {**look(uri), "rows_shown": rows}, indent=2))
        return 0
    if row is None:
        print_summary(uri, summary)
    print_rows(shown_rows, whole=row is not None)
    if source is not None and count and not shown_rows:
        raise ShardError(f"no row{f' from {row} on' if row else ''} holds a document of source {source!r}", where=uri,
                         fix=show.sources_told(uri))
    return 0


@app.command
def verify(uri: Annotated[str, Parameter(help="A shard set: the folder that holds manifest.json.")]) -> int:
    """Check every hash, row and segment of a shard set. Exit code 2 if anything is wrong."""
    from tidewheel.shards.manifest import REBUILD
    from tidewheel.shards.verify import verify as check

    problems = check(uri)
    for problem in problems:
        print(printable(problem))
    if problems:
        raise ShardError(f"{len(problems)} problem(s), listed above", where=uri, fix=REBUILD)
    print(f"{uri}: intact")
    return 0


@app.command
def trace(
    uri: Annotated[str | None, Parameter(help="A shard set; with --run, where the run's set is now.")] = None,
    *,
    row: Annotated[int | None, Parameter(help="Row of the set, from 0; with --token.")] = None,
    token: Annotated[int | None, Parameter(help="Token of the row, from 0: show its document, file and "
                                                "verdicts.")] = None,
    document: Annotated[str | None, Parameter(help="Id of a document: rows that hold it, or why it was dropped; "
                                                   "with --run also the steps that used it.")] = None,
    run: Annotated[str | None, Parameter(help="URI of a run.")] = None,
    step: Annotated[int | None, Parameter(help="Step of the run, from 1: what it read.")] = None,
    batch_row: Annotated[int | None, Parameter(help="Sequence of the step's global batch, from 0.")] = None,
    as_json: AsJson = False,
) -> int:
    """Trace lineage: from a token or a step to documents and files, or from a document to rows and steps."""
    from tidewheel.shards import trace as of_set
    from tidewheel.train import trace as of_run

    options = {"uri": uri, "row": row, "token": token, "document": document, "run": run, "step": step,
               "batch_row": batch_row}
    given = {name for name, value in options.items() if value is not None}
    if run is not None and step is not None and given <= {"uri", "run", "step", "batch_row", "token"}:
        result = of_run.trace_step(run, step, batch_row=batch_row, token=token, uri=uri)
        lines = of_run.step_lines(result)
    elif run is not None and document is not None and given <= {"uri", "run", "document"}:
        result = of_run.trace_document_steps(run, document, uri=uri)
        lines = of_run.document_step_lines(result)
    elif uri is not None and document is not None and given == {"uri", "document"}:
        result = of_set.trace_document(uri, document)
        lines = of_set.document_lines(result)
    elif uri is not None and row is not None and token is not None and given == {"uri", "row", "token"}:
        result = of_set.trace_token(uri, row, token)
        lines = of_set.token_lines(result)
    else:
        raise ShardError("these options do not determine what to trace", where="tidewheel shards trace",
                         fix="give SET --row N --token N, SET --document ID, --run RUN --step N [--batch-row N "
                             "[--token N]], or --run RUN --document ID")
    print(json.dumps(result, indent=2) if as_json else "\n".join(map(printable, lines)))
    return 0
