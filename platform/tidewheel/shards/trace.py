"""Trace a token of a shard set to its document and file, and a document to the rows that hold it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.errors import ShardError
from tidewheel.shards import preferences
from tidewheel.shards.lineage import KEPT, lineage, output_of
from tidewheel.shards.manifest import PACKED, read_manifest
from tidewheel.shards.reader import ShardSet
from tidewheel.storage import Store, store

SETS = ("shards", "validation")
"""Folders of the sets that a pipeline writes."""
SHOWN = 20
"""Number of pieces and documents that the readable form lists."""


def trace_token(uri: str, row: int, token: int) -> dict[str, Any]:
    """Return where a token came from.

    Args:
        uri: the set.
        row: index of the row in the whole set, from 0.
        token: index of the token in the row, from 0.

    Returns:
        {"set", "row", "id", "token", "value", "segment": {...}, "document_offset", "lineage"}; see `segments` and
        `lineage.lineage`. "lineage" is None when the set is not inside a pipeline's output.

    Raises:
        ShardError: there is no such row or token, or a file is damaged.
    """
    shard_set = ShardSet.open(uri)
    index, inside = find_row(shard_set, row)
    in_row = segments(shard_set, index, inside)
    length = int(shard_set.shard(index).lengths[inside])
    where = f"{shard_set.store.uri} row {row}"
    if not 0 <= token < length:
        raise ShardError(f"there is no token {token}", where=where,
                         fix=f"the tokens of this row are numbered from 0 to {length - 1}; the rest is padding")
    segment = next(segment for segment in reversed(in_row) if segment["start"] <= token)
    return {
        "set": shard_set.store.uri, "row": row, "id": row_id(shard_set, index, inside), "token": token,
        "value": int(shard_set.shard(index).tokens[inside, token]), "segment": segment,
        "document_offset": segment["document_offset"] + token - segment["start"],
        "lineage": _lineage(uri, segment["document"], packed=True)}


def trace_document(uri: str, document: str) -> dict[str, Any]:
    """Return every piece of a document in the set or, if there is none, what became of it.

    Args:
        uri: the set.
        document: the document's id.

    Returns:
        {"set", "document", "pieces": [{"row", "id", "segment", "start", "tokens", "document_offset"}], "other_sets":
        URIs of the sets beside this one that hold it, "lineage"}; see `lineage.lineage`.

    Raises:
        ShardError: the document is neither in the set nor in the pipeline's output, or a file is damaged.
    """
    set_store = store(uri)
    in_set = _pieces_in(uri, document)
    other_uris = [] if in_set else [other for other in _other_sets(set_store) if _pieces_in(other, document)]
    known = _lineage(uri, document, packed=bool(in_set or other_uris))
    was_read = known is not None and (known["origins"] or any(
        verdict["verdict"] == "drop" for verdict in known["verdicts"]))
    if not in_set and not other_uris and not was_read:
        raise ShardError(f"no document {document!r}", where=set_store.uri,
                         fix="`tidewheel shards inspect URI --row N` shows ids of documents; records that could not "
                             "be read are in the output's quarantine/")
    return {"set": set_store.uri, "document": document, "pieces": in_set, "other_sets": other_uris, "lineage": known}


def _pieces_in(uri: str, document: str) -> list[dict[str, Any]]:
    """Return the pieces of a document in a set; in a preference set, the row with its pair."""
    set_store = store(uri)
    manifest = read_manifest(set_store)
    if manifest.kind == PACKED:
        return list(pieces(ShardSet.open(uri), document))
    first, pieces_of_set = 0, []
    for info in manifest.shards:
        batch = preferences.read_shard(set_store, info, manifest)
        hits = pc.equal(batch.column("document_id"), pa.scalar(document)).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(hits).tolist():
            tokens = sum(len(batch.column(name)[row].as_py()) for name in ("chosen", "rejected"))
            pieces_of_set.append({"row": first + row, "id": f"{info.name}:{row}", "segment": 0, "start": 0,
                                  "tokens": tokens, "document_offset": 0})
        first += info.rows
    return pieces_of_set


def pieces(shard_set: ShardSet, document: str) -> Iterator[dict[str, Any]]:
    """Yield the segments that hold a piece of the document, in the order of the rows. One shard is open at a time.

    Args:
        shard_set: an open set.
        document: the document's id.
    """
    first = 0
    for index, info in enumerate(shard_set.manifest.shards):
        shard = shard_set.shard(index)
        documents = shard.batch.column("document_ids")
        hits = np.flatnonzero(pc.equal(documents.values, pa.scalar(document)).to_numpy(zero_copy_only=False))
        rows = np.searchsorted(documents.offsets.to_numpy(), hits, side="right") - 1
        for row in np.unique(rows).tolist():
            for segment_index, segment in enumerate(segments(shard_set, index, row)):
                if segment.pop("document") == document:
                    yield {"row": first + row, "id": row_id(shard_set, index, row), "segment": segment_index, **segment}
        first += info.rows


def find_row(shard_set: ShardSet, row: int) -> tuple[int, int]:
    """Return (index of the shard, row in that shard) of row `row` of the whole set.

    Raises:
        ShardError: there is no such row.
    """
    manifest = shard_set.manifest
    if not 0 <= row < manifest.rows:
        raise ShardError(f"there is no row {row}", where=shard_set.store.uri,
                         fix=f"rows of this set are numbered from 0 to {manifest.rows - 1}")
    ends = np.cumsum([shard.rows for shard in manifest.shards])
    index = int(np.searchsorted(ends, row, side="right"))
    return index, row - int(ends[index]) + manifest.shards[index].rows


def row_id(shard_set: ShardSet, index: int, row: int) -> str:
    """Return the sequence id of a row, "shardname:row", as in `Rows.ids`.

    Args:
        shard_set: an open set.
        index: index of the shard.
        row: index of the row in the shard.
    """
    return f"{shard_set.manifest.shards[index].name}:{row}"


def segments(shard_set: ShardSet, index: int, row: int) -> list[dict[str, Any]]:
    """Return the segments of a row, each {"start", "tokens", "document", "document_offset"}.

    Args:
        shard_set: an open set.
        index: index of the shard.
        row: index of the row in the shard.

    Raises:
        ShardError: the row is damaged.
    """
    batch = shard_set.shard(index).batch.slice(row, 1)
    starts, ids, offsets = (batch.column(name)[0].as_py() for name in ("segment_starts", "document_ids",
                                                                      "document_offsets"))
    ends = [*starts[1:], batch.column("length")[0].as_py()]
    if not len(starts) == len(ids) == len(offsets):
        raise ShardError(f"row {row}: segments and documents differ in number",
                         where=shard_set.store.at(shard_set.manifest.shards[index].name),
                         fix=f"`tidewheel shards verify {shard_set.store.uri}` lists what is damaged")
    return [{"start": start, "tokens": end - start, "document": document, "document_offset": offset}
            for start, end, document, offset in zip(starts, ends, ids, offsets)]


def _lineage(uri: str, document: str, *, packed: bool) -> dict[str, Any] | None:
    output = output_of(uri)
    return None if output is None else lineage(output, document, packed=packed)


def _other_sets(set_store: Store) -> list[str]:
    """Return the URIs of other sets that the same pipeline wrote."""
    output = output_of(set_store.uri)
    if output is None:
        return []
    return [output.at(name) for name in SETS
            if output.at(name) != set_store.uri and output.exists(f"{name}/manifest.json")]


def token_lines(trace: dict[str, Any]) -> list[str]:
    """Return the result of `trace_token` as readable lines."""
    segment = trace["segment"]
    end = segment["start"] + segment["tokens"]
    return [f"row {trace['row']} is {trace['id']}; token {trace['token']} has the value {trace['value']}",
            f"segment: tokens {segment['start']} to {end - 1} of the row",
            f"document {segment['document']}, token {trace['document_offset']} of it",
            *lineage_lines(trace["lineage"])]


def document_lines(trace: dict[str, Any]) -> list[str]:
    """Return the result of `trace_document` as readable lines."""
    lines = [f"document {trace['document']}"]
    lines += [f"  row {piece['row']} ({piece['id']}) segment {piece['segment']}: {piece['tokens']} tokens from "
              f"{piece['start']}, the document's from {piece['document_offset']}" for piece in trace["pieces"][:SHOWN]]
    lines += [f"  and {len(trace['pieces']) - SHOWN} more pieces"] * (len(trace["pieces"]) > SHOWN)
    if not trace["pieces"]:
        lines.append("  not in this set" + "".join(f"; it is in {other}" for other in trace["other_sets"]))
    return lines + lineage_lines(trace["lineage"])


def lineage_lines(known: dict[str, Any] | None) -> list[str]:
    """Return the result of `lineage.lineage` as readable lines."""
    if known is None:
        return ["no pipeline output beside this set: source and verdicts are not known"]
    lines = []
    for origin in known["origins"]:
        line = f" line {origin['line']}" if origin["line"] else ""
        if not line and origin["offset"] is not None:  # a large file, read in ranges
            line = f" from byte {origin['offset']}"
        lines.append(f"source {origin['source'] or 'not recorded'}, file {origin['file'] or 'not recorded'}{line}")
    lines += [f"  {verdict['stage']}: {_outcome(verdict)}" for verdict in known["verdicts"]]
    favoured = known["stands_for"]
    lines += [f"stands for {len(favoured)} dropped documents:"] * bool(favoured)
    lines += [f"  {dropped['document']} ({dropped['stage']}: {_reason(dropped)})" for dropped in favoured[:SHOWN]]
    return lines + [f"  and {len(favoured) - SHOWN} more"] * (len(favoured) > SHOWN)


def _outcome(verdict: dict[str, Any]) -> str:
    if verdict["reason"] is None:
        return verdict["verdict"]
    survivor = f", in favour of {verdict['survivor']}" if verdict["survivor"] else ""
    return f"{verdict['verdict'] or KEPT}: {_reason(verdict)}{survivor}"


def _reason(verdict: dict[str, Any]) -> str:
    return verdict["reason"] + (f", score {verdict['score']:.4g}" if verdict["score"] is not None else "")
