"""What a pipeline's output tells about one document: where it was read, what each stage decided, whom it stands for.

Read from `summary.json`, `verdicts/` and the units of `stages/`; one file is open at a time, and of it only the rows
of this document. Nothing of the pipeline's code is needed: the files are the contract.
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
    """What the pipeline that wrote the set at `set_uri` wrote beside it; None when the set stands alone."""
    parent, _, name = store(set_uri).uri.rstrip("/").rpartition("/")
    if not parent or parent.endswith((":", ":/")) or not name:
        return None
    place = store(parent)
    return place if place.exists("summary.json") else None


def lineage(output: Store, document: str, *, packed: bool) -> dict[str, Any]:
    """The document's origins, its verdict in each stage in order, and the documents dropped in its favour.

    Args:
        output: what the pipeline wrote.
        document: its id.
        packed: it is in a set. Then a drop was of another record with the same id, and the stages behind it saw it.

    Returns:
        {"document", "origins": [{"source", "file", "line", "offset"}], "verdicts": [{"stage", "verdict": kept, edit,
        drop or not reached, "reason", "score", "survivor", "detail"}], "stands_for": [{"document", "stage", "reason",
        "score", "detail"}]}. A value that was not recorded is None.

    Raises:
        ShardError: a file of the output is damaged.
    """
    origins = _origins(output, document)
    judged: list[dict[str, Any]] = []
    favoured: list[dict[str, Any]] = []
    gone = False
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
            judged.append(_verdict(stage, NOT_REACHED if gone else KEPT))
        gone = gone or (not packed and any(row["verdict"] == "drop" for row in own))
        judged += own
    dropped_at = [row.pop("_file") for row in judged if "_file" in row]
    if not origins and dropped_at:  # a leading filter dropped it: the unit with these verdicts is its file's
        origins = [{"source": None, "file": name, "line": None, "offset": None}
                   for name in _files_of(output, set(dropped_at))]
    return {"document": document, "origins": origins, "verdicts": judged, "stands_for": favoured}


class Sources:
    """Which source each document came from, from the units of the partition stage.

    They are in the order of the shards that were packed from them, so that following a set reads each about once. Of a
    unit only the rows of the documents in question are kept.
    """

    def __init__(self, output: Store) -> None:
        self._output, self._files = output, _unit_files(output, "partition", "documents")
        self._at = 0

    def of(self, documents: Iterable[str]) -> dict[str, str]:
        """Return {document: source} of those that are known.

        Raises:
            ShardError: a unit is damaged.
        """
        missing, found = set(documents), dict[str, str]()
        for key in self._files[self._at :] + self._files[: self._at]:
            if not missing:
                break
            here = self._in(key, missing)
            if here:
                self._at = self._files.index(key)
            found |= here
            missing -= here.keys()
        return found

    def _in(self, key: str, documents: set[str]) -> dict[str, str]:
        wanted, found = pa.array(sorted(documents), pa.string()), dict[str, str]()
        try:
            with self._output.open(key) as stream:
                for batch in _batches(stream, ("id", "source")):
                    rows = batch.filter(pc.is_in(batch["id"], wanted))
                    found |= dict(zip(rows["id"].to_pylist(), rows["source"].to_pylist(), strict=True))
        except FileNotFoundError:
            return {}  # a unit of an earlier run that was cleared away
        except (pa.ArrowException, OSError) as error:
            raise _damaged(self._output, key, error) from None
        return found


def known_sources(output: Store) -> list[str]:
    """Return names of sources that the pipeline read: those with most documents."""
    told = output.read_json("summary.json").get("sources") or [{"left": {}}]
    return sorted(told[0]["left"])


def _verdict(stage: str, verdict: str) -> dict[str, Any]:
    return {"stage": stage, "verdict": verdict, "reason": None, "score": None, "survivor": None, "detail": None}


def _verdict_files(output: Store) -> dict[str, list[str]]:
    """Verdict files of each stage that judged, the stages in the recipe's order."""
    found: dict[str, list[str]] = {}
    for stamp in output.list("verdicts"):
        _, stage, name = stamp.key.split("/", 2)
        files = found.setdefault(stage, [])
        if name.endswith(".parquet"):
            files.append(stamp.key)
    order = [entry["name"] for entry in output.read_json("summary.json")["stages"]]
    return {stage: found[stage] for stage in order if stage in found}


def _rows(output: Store, key: str, document: str) -> list[dict[str, Any]]:
    """Verdicts on the document, or in its favour; files are sorted by id, and statistics skip what cannot hold it."""
    wanted = (pc.field("id") == document) | (pc.field("survivor") == document)
    try:
        with output.open(key) as stream:
            rows = pq.read_table(pa.PythonFile(stream, mode="r"), filters=wanted).to_pylist()
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
    """Where the document was read, from the units of the partition stage; [] when it did not come so far."""
    found: list[dict[str, Any]] = []
    for key in _unit_files(output, "partition", "documents"):
        try:
            with output.open(key) as stream:
                found += _search(stream, document)
        except FileNotFoundError:
            continue  # a unit of an earlier run that was cleared away
        except (pa.ArrowException, OSError) as error:
            raise _damaged(output, key, error) from None
    return [origin for place, origin in enumerate(found) if origin not in found[:place]]


def _search(stream: Any, document: str) -> list[dict[str, Any]]:
    """Origins of the document among one unit's rows, which are sorted by id; a batch in memory at a time."""
    found = []
    for batch in _batches(stream, ("id", "source", "meta")):
        if not batch.num_rows or batch["id"][-1].as_py() < document:
            continue
        if batch["id"][0].as_py() > document:
            break
        for row in batch.filter(pc.equal(batch["id"], document)).to_pylist():
            meta = _parsed(row["meta"])
            meta = meta if isinstance(meta, dict) else {}
            found.append({"source": row["source"], "file": meta.get("_file"), "line": meta.get("_line"),
                          "offset": meta.get("_offset")})
    return found


def _batches(stream: Any, names: Iterable[str]) -> Iterable[pa.RecordBatch]:
    """Batches of a unit's documents, with these columns alone."""
    schema = pa.ipc.open_stream(pa.PythonFile(stream, mode="r")).schema
    stream.seek(0)
    options = pa.ipc.IpcReadOptions(included_fields=sorted(schema.get_field_index(name) for name in names))
    return pa.ipc.open_stream(pa.PythonFile(stream, mode="r"), options=options)


def _unit_files(output: Store, stage: str, name: str) -> list[str]:
    """Keys of the files `name` of a stage's units."""
    units = output.list(f"stages/{stage}/units")
    return [stamp.key for stamp in units if stamp.key.endswith(f"/{name}")]


def _files_of(output: Store, verdict_files: set[str]) -> list[str]:
    """Source files whose units wrote one of these verdict files."""
    found = set()
    for stamp in output.list("stages/ingest/units"):
        if stamp.key.endswith(".json"):
            unit = output.read_json(stamp.key)
            if unit["files"].get("verdicts", [""])[0] in verdict_files:
                found.add(unit["summary"]["name"])
    return sorted(found)


def _damaged(output: Store, key: str, error: Exception) -> ShardError:
    told = str(error).splitlines() or [type(error).__name__]
    return ShardError(f"cannot be read ({told[0]})", where=output.at(key), mend=REBUILD)
