"""The lineage of a document in a pipeline's output: its source, each stage's verdict, and the duplicates it replaces.

It is read from `summary.json`, `verdicts/` and the units of `stages/`, one file at a time and only the rows of this
document. None of the pipeline's code is needed: the files are the contract.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidewheel.errors import ShardError
from tidewheel.shards.manifest import REBUILD
from tidewheel.storage import Store, store

KEPT, NOT_REACHED = "kept", "not reached"


def output_of(set_uri: str) -> Store | None:
    """Return the output of the pipeline that wrote the set at `set_uri`; None when the set stands alone."""
    parent, _, name = store(set_uri).uri.rstrip("/").rpartition("/")
    if not parent or parent.endswith((":", ":/")) or not name:
        return None
    parent_store = store(parent)
    return parent_store if parent_store.exists("summary.json") else None


def lineage(output: Store, document: str, *, packed: bool) -> dict[str, Any]:
    """Return a document's origins, its verdict in each stage in order, and the documents dropped in its favour.

    Args:
        output: the pipeline's output.
        document: the document's id.
        packed: the document is in a set. Then a drop was of another record with the same id, and later stages saw the
            document.

    Returns:
        {"document", "origins": [{"source", "file", "line", "offset"}], "verdicts": [{"stage", "verdict": kept, edit,
        drop or not reached, "reason", "score", "survivor", "detail"}], "stands_for": [{"document", "stage", "reason",
        "score", "detail"}]}. Values that were not recorded are None.

    Raises:
        ShardError: a file of the output is damaged.
    """
    origins = _origins(output, document)
    judged: list[dict[str, Any]] = []
    favoured: list[dict[str, Any]] = []
    is_dropped = False
    files = _verdict_files(output)
    for stage, keys in files.items():
        own = []
        for key in keys:
            for row in _rows(output, key, document):
                if row["id"] == document and row["survivor"] != document:
                    own.append({"stage": stage, **{name: row[name] for name in ("verdict", "reason", "score",
                                                                                "survivor", "detail")}, "_file": key})
                elif row["survivor"] == document:
                    favoured.append({"document": row["id"], "stage": stage,
                                     **{name: row[name] for name in ("reason", "score", "detail")}})
        if not own:
            judged.append(_verdict(stage, NOT_REACHED if is_dropped else KEPT))
        is_dropped = is_dropped or (not packed and any(row["verdict"] == "drop" for row in own))
        judged += own
    dropped_at = [row.pop("_file") for row in judged if "_file" in row]
    if not origins and dropped_at:  # a leading filter dropped it: its verdicts are in the unit of its file
        origins = [{"source": None, "file": name, "line": None, "offset": None}
                   for name in _files_of(output, set(dropped_at))]
    return {"document": document, "origins": origins, "verdicts": judged, "stands_for": favoured}


class Sources:
    """The source of each document, read from the units of the partition stage.

    Units are in the order of the shards packed from them, so that reading along a set reads each about once. Only the
    rows of the requested documents are kept in memory.

    Args:
        output: the pipeline's output.
    """

    def __init__(self, output: Store) -> None:
        self._output, self._files = output, _unit_files(output, "partition", "documents")
        self._last = 0  # index of the unit that held the last document

    def of(self, documents: Iterable[str]) -> dict[str, str]:
        """Return {document: source} of the documents that are known.

        Raises:
            ShardError: a unit is damaged.
        """
        missing = set(documents)
        sources: dict[str, str] = {}
        for key in self._files[self._last :] + self._files[: self._last]:
            if not missing:
                break
            in_unit = self._in(key, missing)
            if in_unit:
                self._last = self._files.index(key)
            sources |= in_unit
            missing -= in_unit.keys()
        return sources

    def _in(self, key: str, documents: set[str]) -> dict[str, str]:
        requested = pa.array(sorted(documents), pa.string())
        sources: dict[str, str] = {}
        try:
            with self._output.open(key) as stream:
                for batch in _batches(stream, ("id", "source")):
                    rows = batch.filter(pc.is_in(batch["id"], requested))
                    sources |= dict(zip(rows["id"].to_pylist(), rows["source"].to_pylist(), strict=True))
        except FileNotFoundError:
            return {}  # a unit of an earlier run that has been deleted
        except (pa.ArrowException, OSError) as error:
            raise _damaged(self._output, key, error) from None
        return sources


def known_sources(output: Store) -> list[str]:
    """Return the names of the sources with the most documents that the pipeline read."""
    counts = output.read_json("summary.json").get("sources") or [{"left": {}}]
    return sorted(counts[0]["left"])


def _verdict(stage: str, verdict: str) -> dict[str, Any]:
    return {"stage": stage, "verdict": verdict, "reason": None, "score": None, "survivor": None, "detail": None}


def _verdict_files(output: Store) -> dict[str, list[str]]:
    """Return the verdict files of each stage that has any, in the recipe's order."""
    by_stage: dict[str, list[str]] = {}
    for stamp in output.list("verdicts"):
        _, stage, name = stamp.key.split("/", 2)
        files = by_stage.setdefault(stage, [])
        if name.endswith(".parquet"):
            files.append(stamp.key)
    order = [entry["name"] for entry in output.read_json("summary.json")["stages"]]
    return {stage: by_stage[stage] for stage in order if stage in by_stage}


def _rows(output: Store, key: str, document: str) -> list[dict[str, Any]]:
    """Return the verdicts on the document or in its favour. Files are sorted by id, so statistics skip most of them."""
    matches = (pc.field("id") == document) | (pc.field("survivor") == document)
    try:
        with output.open(key) as stream:
            rows = pq.read_table(pa.PythonFile(stream, mode="r"), filters=matches).to_pylist()
    except (pa.ArrowException, FileNotFoundError) as error:
        raise _damaged(output, key, error) from None
    for row in rows:
        row["detail"] = _parsed(row["detail"])
    return rows


def _parsed(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def _origins(output: Store, document: str) -> list[dict[str, Any]]:
    """Return where the document was read, from the units of the partition stage; [] when it was dropped before."""
    origins: list[dict[str, Any]] = []
    for key in _unit_files(output, "partition", "documents"):
        try:
            with output.open(key) as stream:
                origins += _search(stream, document)
        except FileNotFoundError:
            continue  # a unit of an earlier run that has been deleted
        except (pa.ArrowException, OSError) as error:
            raise _damaged(output, key, error) from None
    return [origin for index, origin in enumerate(origins) if origin not in origins[:index]]


def _search(stream: Any, document: str) -> list[dict[str, Any]]:
    """Return the origins of the document in one unit, whose rows are sorted by id. One batch is in memory at a time."""
    origins = []
    for batch in _batches(stream, ("id", "source", "meta")):
        if not batch.num_rows or batch["id"][-1].as_py() < document:
            continue
        if batch["id"][0].as_py() > document:
            break
        for row in batch.filter(pc.equal(batch["id"], document)).to_pylist():
            meta = _parsed(row["meta"])
            meta = meta if isinstance(meta, dict) else {}
            origins.append({"source": row["source"], "file": meta.get("_file"), "line": meta.get("_line"),
                            "offset": meta.get("_offset")})
    return origins


def _batches(stream: Any, names: Iterable[str]) -> Iterable[pa.RecordBatch]:
    """Return the batches of a unit's documents, with only these columns."""
    schema = pa.ipc.open_stream(pa.PythonFile(stream, mode="r")).schema
    stream.seek(0)
    options = pa.ipc.IpcReadOptions(included_fields=sorted(schema.get_field_index(name) for name in names))
    return pa.ipc.open_stream(pa.PythonFile(stream, mode="r"), options=options)


def _unit_files(output: Store, stage: str, name: str) -> list[str]:
    """Return the keys of the files `name` in a stage's units."""
    units = output.list(f"stages/{stage}/units")
    return [stamp.key for stamp in units if stamp.key.endswith(f"/{name}")]


def _files_of(output: Store, verdict_files: set[str]) -> list[str]:
    """Return the source files whose units wrote one of these verdict files."""
    names = set()
    for stamp in output.list("stages/ingest/units"):
        if stamp.key.endswith(".json"):
            unit = output.read_json(stamp.key)
            if unit["files"].get("verdicts", [""])[0] in verdict_files:
                names.add(unit["summary"]["name"])
    return sorted(names)


def _damaged(output: Store, key: str, error: Exception) -> ShardError:
    lines = str(error).splitlines() or [type(error).__name__]
    return ShardError(f"cannot be read ({lines[0]})", where=output.at(key), fix=REBUILD)
