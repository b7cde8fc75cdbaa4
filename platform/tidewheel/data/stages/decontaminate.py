"""Decontamination, partition by partition: drop, cut or annotate documents that contain evaluation items.

The stage `decontaminate_index` builds the index of all items once, and `decontaminate` judges the documents. After
packing, `decontaminate_packed` decodes the rows, searches them again and reports matches.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel.data import text, verdicts
from tidewheel.data.config import DecontaminateStep
from tidewheel.data.decontaminate import EvalIndex, Match, Rules, contamination, find
from tidewheel.data.stage import Published, Unit, read_file, read_table, unit_key
from tidewheel.data.stages import drops, keys, outcomes, rewrite
from tidewheel.data.stages.drops import after, part_tasks, publish
from tidewheel.data.stages.execute import Finished, Runner, Task, map_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.partition import Part, load_documents
from tidewheel.data.stages.rewrite import Rewriter
from tidewheel.errors import InputError
from tidewheel.storage import Stamp, store
from tidewheel.versions import Version

STAGE, INDEX, PACKED = "decontaminate", "decontaminate_index", "decontaminate_packed"
REASON, REASON_CUT = "contaminated", "contaminated_cut"
INDEX_VERSION = Version("evaluation_index", uses=(text.VERSION,))
VERSION = Version("decontaminate", uses=(INDEX_VERSION, drops.VERSION, outcomes.VERSION, rewrite.VERSION))
_MATCH_CHARACTERS = 500
_TOP = 100
"""Items that the summary lists one by one."""
_ITEMS = pa.schema([("benchmark", pa.string()), ("item", pa.string()), ("id", pa.string()), ("score", pa.float64()),
                    ("match", pa.string())])


def run(job: Job, runner: Runner, parts: list[Part], fail_above: float | None = None
        ) -> tuple[Finished, list[Part], dict[str, Any]]:
    """Judge every partition.

    Args:
        job: what the stage works on.
        runner: completes the units.
        parts: partitions after the stage before.
        fail_above: overrides `fail_above` of the recipe.

    Returns:
        The units, the partitions after the stage, and the entry `contamination` of the summary.

    Raises:
        InputError: a larger share of the documents than `fail_above` contains evaluation items.
    """
    step: DecontaminateStep = job.config.step(STAGE)
    index = runner.complete(INDEX, [_index_task(job)], lambda missing: (_publish_index(task, job) for task in missing))
    stamp = index.units[0].files["index"]
    settings = {"action": step.action, "ngram": step.ngram}
    minhash = keys.minhash_settings(job.config) if step.action == "cut" else None
    todo = part_tasks(job, STAGE, parts, settings=[settings, minhash, stamp.hash], version=VERSION,
                      together=False, more={"index": stamp, **settings})
    done = runner.complete(STAGE, todo, lambda missing: map_units(missing, judge_part), note=f"{len(job.evals)} items")
    summary = _summary(job, done.units, index.units[0].summary["sets"], step.action)
    _check_share(job, summary, step.fail_above if fail_above is None else fail_above)
    return Finished(done.units, done.reused, done.seconds + index.seconds), after(parts, done.units), summary


def _index_task(job: Job) -> Task:
    items = [[item.name, item.item, item.text, item.answer] for item in job.evals]
    key = unit_key(INDEX, settings=[], version=INDEX_VERSION, inputs=[json.dumps(items)])
    return Task(job.output, Unit(INDEX, "index", key))


def _publish_index(task: Task, job: Job) -> Published:
    """Build the index of all items. It is small compared to the documents, so the driver builds it."""
    index = EvalIndex.build(job.evals)
    writer = task.writer()
    writer.file("index", index.to_bytes())
    return writer.publish({"sets": [dict(entry) for entry in index.sets]})


@lru_cache(maxsize=2)
def _index(output: str, key: str, size: int, hash: str) -> EvalIndex:
    return EvalIndex.from_bytes(read_file(store(output), Stamp(key, size, hash)))


def _search(task: Task) -> tuple[EvalIndex, Rules]:
    stamp = task.inputs["index"]
    return _index(task.output, stamp.key, stamp.bytes, stamp.hash), Rules(ngram=task.inputs["ngram"])


def judge_part(task: Task) -> Published:
    """Publish the unit of one partition: verdicts, matching items (`items`), and for `cut` the edited documents."""
    index, rules = _search(task)
    action = task.inputs["action"]
    judged: list[pa.Table] = []
    heads = [outcomes.HEADS.empty_table()]
    tables = [_ITEMS.empty_table()]
    with contextlib.ExitStack() as closing:
        rewriter = closing.enter_context(Rewriter(task)) if action == "cut" else None
        for table in load_documents(task.store, task.inputs):
            matches = find(index, table["text"], rules)
            rows = np.array([bool(document_matches) for document_matches in matches], bool)
            primaries = [contamination.primary(document_matches) for document_matches in matches if document_matches]
            hit = table.filter(pa.array(rows))
            tables.append(_items(hit["id"].to_pylist(), primaries))
            texts = hit["text"].to_pylist()
            cuts = [""] * len(texts)
            if rewriter is not None:
                hit_matches = [document_matches for document_matches in matches if document_matches]
                cuts = [contamination.cut(index, text, document_matches, rules)
                        for text, document_matches in zip(texts, hit_matches, strict=True)]
            judged.append(_verdicts(hit["id"], primaries, action, cuts))
            heads.append(_heads(judged[-1], texts, cuts, hit["id"].to_pylist()))
            if rewriter is not None:
                _rewrite(rewriter, table, rows, cuts)
    writer = rewriter.writer if rewriter is not None else task.writer()
    items = pa.concat_tables(tables)
    if len(items):
        writer.table("items", items)
    return publish(task, verdicts.merge(judged), pa.concat_tables(heads), {"contaminated": sum(map(len, judged))},
                   writer)


def _items(ids: Sequence[str], primaries: Sequence[Sequence[Match]]) -> pa.Table:
    rows = [{"benchmark": match.benchmark, "item": match.item, "id": identity, "score": match.score,
             "match": match.text[:_MATCH_CHARACTERS]}
            for identity, matches in zip(ids, primaries, strict=True) for match in matches]
    return pa.Table.from_pylist(rows, schema=_ITEMS)


def _verdicts(ids: pa.ChunkedArray, primaries: Sequence[Sequence[Match]], action: str, cuts: Sequence[str]) -> pa.Table:
    """Return a verdict for each contaminated document, with its best match and the number of matching items."""
    best = [matches[0] for matches in primaries]
    details = [json.dumps({"benchmark": match.benchmark, "item": match.item, "match": match.text[:_MATCH_CHARACTERS],
                           "items": len(matches)}, ensure_ascii=False)
               for match, matches in zip(best, primaries, strict=True)]
    kinds = [verdicts.KEEP if action == "annotate" else verdicts.EDIT if text else verdicts.DROP for text in cuts]
    reasons = [REASON_CUT if kind == verdicts.EDIT else REASON for kind in kinds]
    table = verdicts.rows("", ids, reasons, scores=[match.score for match in best], details=details)
    column = table.schema.get_field_index("verdict")
    return table.set_column(column, table.schema.field(column), pa.array(kinds, pa.string()))


def _heads(judged: pa.Table, texts: Sequence[str], cuts: Sequence[str], ids: Sequence[str]) -> pa.Table:
    """Return `outcomes.HEADS` of the documents that samples may show."""
    rows = []
    for row in verdicts.sampled(judged).tolist():
        if cuts[row]:
            head, after = verdicts.change(texts[row], cuts[row])
        else:
            head, after = verdicts.head(texts[row]), None
        rows.append({"id": ids[row], "reason": judged["reason"][row].as_py(), "head": head, "after": after})
    return pa.Table.from_pylist(rows, schema=outcomes.HEADS)


def _rewrite(rewriter: Rewriter, table: pa.Table, rows: np.ndarray, cuts: Sequence[str]) -> None:
    texts = table["text"].to_pylist() if rows.any() else []
    kept = np.ones(len(table), bool)
    for row, rest in zip(np.flatnonzero(rows).tolist(), cuts, strict=True):
        texts[row] = rest
        kept[row] = bool(rest)
    if texts:
        column = table.schema.get_field_index("text")
        table = table.set_column(column, table.schema.field(column), pa.array(texts, table.schema.field(column).type))
    if kept.any():
        rewriter.add(table.filter(pa.array(kept)), (rows & kept)[kept])


def _summary(job: Job, units: Sequence[Published], sets: Sequence[dict[str, Any]], action: str) -> dict[str, Any]:
    """Return the entry of `summary.json`: counts, by benchmark {items, items_found, documents}, and the top items."""
    tables = [read_table(job.store, unit.files["items"]) for unit in units if "items" in unit.files]
    table = pa.concat_tables([_ITEMS.empty_table(), *tables])
    by_item = table.group_by(["benchmark", "item"]).aggregate([("id", "count_distinct")])
    by_benchmark = table.group_by("benchmark").aggregate([("id", "count_distinct")])
    documents = dict(zip(by_benchmark["benchmark"].to_pylist(), by_benchmark["id_count_distinct"].to_pylist(),
                         strict=True))
    names = by_item["benchmark"].to_pylist()
    best = table.sort_by([("benchmark", "ascending"), ("item", "ascending"), ("score", "descending"),
                          ("id", "ascending")])
    shown = {(row["benchmark"], row["item"]): row for row in reversed(best.to_pylist())}
    top = sorted(by_item.to_pylist(), key=lambda row: (-row["id_count_distinct"], row["benchmark"], row["item"]))[:_TOP]
    return {
        "action": action, "documents": sum(unit.summary["contaminated"] for unit in units),
        "documents_in": sum(unit.summary["documents_in"] for unit in units), "sets": list(sets),
        "benchmarks": {str(entry["name"]): {"items": entry["items"], "items_found": names.count(entry["name"]),
                                            "documents": documents.get(str(entry["name"]), 0)} for entry in sets},
        "top": [{"benchmark": row["benchmark"], "item": row["item"], "documents": row["id_count_distinct"],
                 **{name: shown[row["benchmark"], row["item"]][name] for name in ("id", "score", "match")}}
                for row in top],
    }


def _check_share(job: Job, summary: dict[str, Any], limit: float | None) -> None:
    count = summary["documents"]
    total = summary["documents_in"]
    if limit is not None and count > limit * total:
        benchmarks = sorted(summary["benchmarks"].items(), key=lambda pair: (-pair[1]["documents"], pair[0]))
        names = ", ".join(f"{name} in {entry['documents']}" for name, entry in benchmarks if entry["documents"])
        raise InputError(f"{count} of {total} documents hold evaluation items, more than the allowed share of "
                         f"{limit:g} ({names})", where=job.input,
                         fix="verdicts/decontaminate in the output has the matches; remove the documents at their "
                         "source, or raise fail_above")


def check_packed(job: Job, runner: Runner, packed: Sequence[Published], tokenizer: Stamp) -> dict[str, Any] | None:
    """Decode the packed rows and search them again. A match shows a fault between decontamination and packing.

    Args:
        job: what the stage works on.
        runner: completes the units.
        packed: units of the pack stage.
        tokenizer: file of the tokenizer.

    Returns:
        {"segments", "found", "matches"}; None if the recipe does not ask for the check.
    """
    step: DecontaminateStep | None = job.config.step(STAGE)
    if step is None or not step.check_packed or job.config.read.kind == "preferences":
        return None
    from tidewheel.data.tokenize.tokenizer import settings_of

    index = runner.complete(INDEX, [_index_task(job)], lambda missing: (_publish_index(task, job) for task in missing))
    stamp = index.units[0].files["index"]
    more = {"index": stamp, "ngram": step.ngram, "tokenizer": tokenizer,
            "settings": settings_of(job.config.step("tokenize")).canonical()}
    todo = [Task(job.output, Unit(PACKED, unit.unit.label, unit_key(
        PACKED, settings=[step.ngram, more["settings"], unit.unit.number], version=VERSION,
        inputs=[stamp.hash, tokenizer.hash, *(entry.hash for _, entry in _shards(unit))]), unit.unit.number),
        {**more, "shards": [entry for _, entry in _shards(unit)]}) for unit in packed]
    done = runner.complete(PACKED, todo, lambda missing: map_units(missing, check_unit))
    matches = [match for unit in done.units for match in unit.summary["matches"]]
    return {"segments": sum(unit.summary["segments"] for unit in done.units),
            "found": sum(unit.summary["found"] for unit in done.units), "matches": matches[:_TOP]}


def _shards(unit: Published) -> list[tuple[str, Stamp]]:
    return sorted((name, stamp) for name, stamp in unit.files.items()
                  if stamp.key.startswith(("shards/", "validation/")))


def check_unit(task: Task) -> Published:
    """Publish the matches in the shards of one unit; each segment is decoded and searched by itself."""
    from tidewheel.data.stages.pack import encoder_of

    index, rules = _search(task)
    encoder = encoder_of(task)
    segments = 0
    contaminated = 0
    reported: list[dict[str, Any]] = []
    for stamp in task.inputs["shards"]:
        for ids, texts in _segments(read_file(task.store, stamp), encoder):
            segments += len(texts)
            for identity, matches in zip(ids, find(index, texts, rules), strict=True):
                if matches:
                    contaminated += 1
                    best = contamination.primary(matches)[0]
                    reported.append({"id": identity, "benchmark": best.benchmark, "item": best.item,
                                     "score": best.score, "match": best.text[:_MATCH_CHARACTERS]})
    return task.writer().publish({"segments": segments, "found": contaminated, "matches": reported[:_TOP]})


def _segments(data: bytes, encoder: Any) -> Iterator[tuple[list[str], list[str]]]:
    """Yield (document ids, texts) of the segments, for each batch of rows of a shard."""
    table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
    for batch in table.to_batches(max_chunksize=256):
        tokens = batch["tokens"].flatten().to_numpy().reshape(batch.num_rows, -1)
        ids, pieces = [], []
        for row, length, starts, names in zip(tokens, batch["length"].to_pylist(), batch["segment_starts"].to_pylist(),
                                              batch["document_ids"].to_pylist(), strict=True):
            for begin, end, name in zip(starts, [*starts[1:], length], names, strict=True):
                ids.append(name)
                pieces.append(row[begin:end])
        yield ids, [encoder.decode(piece) for piece in pieces]
