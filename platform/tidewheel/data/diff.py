"""Compare two outputs: settings, versions, inputs, counts, and the documents that only one of them has.

Documents are compared by 64-bit hashes of their ids, one share at a time, so memory does not grow with the sets.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel.data import product, verdicts
from tidewheel.data.stage import read_file
from tidewheel.data.stages import origin, replace
from tidewheel.data.stages.pack import SETS
from tidewheel.errors import InputError
from tidewheel.shards import preferences
from tidewheel.shards.manifest import KEY, PACKED, Manifest, read_manifest
from tidewheel.shards.reader import ShardSet
from tidewheel.storage import Stamp, Store, store

AT_A_TIME = 100_000_000
"""Documents of both outputs whose hashes are in memory at the same time."""
EXAMPLES = 5
NOT_READ = "not among its documents"


@dataclass
class Moved:
    """Documents that only one of the outputs has.

    Args:
        count: number of documents.
        reasons: counts by reason ("stage: reason") for which the other output dropped them.
        examples: some ids.
    """

    count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def canonical(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"documents": self.count, "reasons": dict(self.reasons.most_common()), "examples": self.examples}


@dataclass(frozen=True)
class Difference:
    """Differences between two outputs A and B.

    Args:
        settings: (name, value in A, value in B) of settings that differ.
        versions: the same for versions of packages.
        inputs: number of input files that are the same, changed, gained and lost.
        counts: documents, tokens and rows in A and B.
        gained: documents that only B has.
        lost: documents that only A has.
        both: number of documents that both have.
    """

    settings: list[tuple[str, Any, Any]]
    versions: list[tuple[str, Any, Any]]
    inputs: dict[str, int]
    counts: list[dict[str, Any]]
    gained: Moved
    lost: Moved
    both: int

    def canonical(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"settings": [{"setting": name, "a": a, "b": b} for name, a, b in self.settings],
                "versions": [{"package": name, "a": a, "b": b} for name, a, b in self.versions],
                "inputs": self.inputs, "counts": self.counts, "in_both": self.both,
                "gained": self.gained.canonical(), "lost": self.lost.canonical()}


def compare(a: str, b: str) -> Difference:
    """Compare two finished outputs.

    Raises:
        InputError: no pipeline has finished in one of them.
        ShardError: a set is damaged.
    """
    first = store(a)
    second = store(b)
    summaries = [_summary(output) for output in (first, second)]
    origins = [origin.read(output) for output in (first, second)]
    settings = origin.differences(*(made.get("recipe", {}) for made in origins)) if all(origins) else [
        ("recipe hash", *(summary["recipe_hash"] for summary in summaries))]
    versions = [{**made.get("versions", {}), "commit": made.get("commit", "")} for made in origins]
    gained, lost, both = _documents(first, second)
    return Difference([entry for entry in settings if entry[1] != entry[2]], origin.differences(*versions),
                      _inputs(first, second), _counts(*summaries), gained, lost, both)


def _summary(output: Store) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = output.read_json(replace.SUMMARY)
    except FileNotFoundError:
        raise InputError("no summary.json: no pipeline has finished here", where=output.uri,
                         fix="give two folders that `tidewheel data run` has written to") from None
    return summary


def _inputs(first: Store, second: Store) -> dict[str, int]:
    """Count the input files that are the same, changed, gained and lost; a renamed file counts as the same."""
    before = {line["fingerprint"]: line["file"] for line in origin.read_inputs(first)}
    now = {line["fingerprint"]: line["file"] for line in origin.read_inputs(second)}
    removed = {name for content, name in before.items() if content not in now}
    added = {name for content, name in now.items() if content not in before}
    return {"same": len(before.keys() & now.keys()), "changed": len(removed & added), "gained": len(added - removed),
            "lost": len(removed - added)}


def _counts(before: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows of counts: documents after each stage, and the sizes of the sets."""
    rows: list[dict[str, Any]] = []
    stages = [{entry["name"]: entry["documents_out"] for entry in summary["stages"]} for summary in (before, now)]
    for name in [*stages[0], *(name for name in stages[1] if name not in stages[0])]:
        rows.append({"count": f"documents after {name}", "a": stages[0].get(name), "b": stages[1].get(name)})
    for key in ("documents", "tokens", "rows"):
        rows.append({"count": f"training {key}", "a": before.get(key), "b": now.get(key)})
    for key in ("documents", "tokens"):
        validation = [summary.get("validation", {}).get(key) for summary in (before, now)]
        rows.append({"count": f"validation {key}", "a": validation[0], "b": validation[1]})
    return rows


def _documents(first: Store, second: Store) -> tuple[Moved, Moved, int]:
    """Return (documents gained, documents lost, number of documents in both)."""
    old_sets = _sets(first)
    new_sets = _sets(second)
    total = sum(documents.documents for documents in (*old_sets, *new_sets))
    shares = max(1, -(-total // AT_A_TIME))
    gained = Moved()
    lost = Moved()
    both = 0
    for share in range(shares):
        before = np.unique(_hashes(old_sets, share, shares))
        now = np.unique(_hashes(new_sets, share, shares))
        both += len(np.intersect1d(before, now, assume_unique=True))
        _add(gained, np.setdiff1d(now, before, assume_unique=True), new_sets, first)
        _add(lost, np.setdiff1d(before, now, assume_unique=True), old_sets, second)
    return gained, lost, both


def _add(moved: Moved, hashes: np.ndarray, sets: Sequence[_Set], other: Store) -> None:
    """Add the documents of `sets` with these sorted hashes to `moved`, with the other output's reasons."""
    if not len(hashes):
        return
    moved.count += len(hashes)
    explained = np.zeros(len(hashes), bool)
    for stage, reasons, dropped in _dropped(other):
        indices = np.searchsorted(hashes, dropped).clip(max=len(hashes) - 1)
        hit = (hashes[indices] == dropped) & ~explained[indices]
        explained[indices[hit]] = True
        for reason in reasons.filter(pa.array(hit)).to_pylist():
            moved.reasons[f"{stage}: {reason}"] += 1
    if rest := int((~explained).sum()):
        moved.reasons[NOT_READ] += rest
    for ids in _ids(sets):
        if len(moved.examples) >= EXAMPLES:
            break
        known = np.isin(verdicts.hash_ids(ids), hashes)
        names = dict.fromkeys([*moved.examples, *ids.filter(pa.array(known)).to_pylist()])  # distinct, in order
        moved.examples = list(names)[:EXAMPLES]


def _dropped(output: Store) -> Iterator[tuple[str, pa.ChunkedArray, np.ndarray]]:
    """Yield (stage, reasons, hashes of ids) of the documents that an output dropped, file by file."""
    for file in output.list("verdicts"):
        if file.key.endswith(".parquet"):
            data = read_file(output, Stamp(file.key, file.bytes, output.hash(file.key)))
            table = verdicts.decode(data, ["id", "verdict", "reason"])
            table = table.filter(pa.compute.equal(table["verdict"], verdicts.DROP))
            if len(table):
                yield file.key.split("/")[1], table["reason"], verdicts.hash_ids(table["id"])


@dataclass(frozen=True)
class _Set:
    """Documents of a set.

    Args:
        documents: number of documents.
        ids: yields their ids, some of them several times.
    """

    documents: int
    ids: Callable[[], Iterator[pa.Array]]


def _sets(output: Store) -> list[_Set]:
    """Return the training and the validation set; for an output without them, the product."""
    if not output.child(SETS[0]).exists(KEY) and output.child(product.FOLDER).exists(product.MANIFEST):
        written = output.child(product.FOLDER)
        return [_Set(product.read_manifest(written)["documents"], functools.partial(product.ids, written))]
    manifests = [(output.child(name), read_manifest(output.child(name))) for name in SETS]
    return [_Set(manifest.documents, functools.partial(_packed_ids, child, manifest)) for child, manifest in manifests]


def _hashes(sets: Sequence[_Set], share: int, shares: int) -> np.ndarray:
    """Return the hashes of the ids of one share of the documents, uint64."""
    parts = [np.zeros(0, np.uint64)]
    for ids in _ids(sets):
        hashes = verdicts.hash_ids(ids)
        parts.append(np.unique(hashes[hashes % np.uint64(shares) == share] if shares > 1 else hashes))
    return np.concatenate(parts)


def _ids(sets: Sequence[_Set]) -> Iterator[pa.Array]:
    """Yield the ids of the documents of all sets; a document in several rows comes several times."""
    for documents in sets:
        yield from documents.ids()


def _packed_ids(folder: Store, manifest: Manifest) -> Iterator[pa.Array]:
    if manifest.kind == PACKED:
        shards = ShardSet.open(folder.uri)
        for shard in range(len(manifest.shards)):
            yield shards.shard(shard).batch.column("document_ids").flatten()
    else:
        for batch in preferences.read_pairs(folder.uri):
            yield batch.column("document_id")
