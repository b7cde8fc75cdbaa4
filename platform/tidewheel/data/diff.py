"""Two outputs beside each other: settings, versions, inputs, counts, and which documents one has and the other not.

Documents are compared by 64-bit hashes of their ids, a share of them at a time, so memory does not grow with the sets.
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
"""Documents whose hashes are in memory together, of both outputs."""
EXAMPLES = 5
NOT_READ = "not among its documents"


@dataclass
class Moved:
    """Documents that one output's sets have and the other's have not.

    Args:
        count: how many.
        reasons: what the other output says of them, by "stage: reason".
        examples: ids.
    """

    count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def canonical(self) -> dict[str, Any]:
        """JSON values."""
        return {"documents": self.count, "reasons": dict(self.reasons.most_common()), "examples": self.examples}


@dataclass(frozen=True)
class Difference:
    """What differs from output A to output B; `gained` are documents of B that A has not."""

    settings: list[tuple[str, Any, Any]]
    versions: list[tuple[str, Any, Any]]
    inputs: dict[str, int]
    counts: list[dict[str, Any]]
    gained: Moved
    lost: Moved
    both: int

    def canonical(self) -> dict[str, Any]:
        """JSON values."""
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
    first, second = store(a), store(b)
    summaries = [_summary(place) for place in (first, second)]
    made = [origin.read(place) for place in (first, second)]
    settings = origin.differences(*(one.get("recipe", {}) for one in made)) if all(made) else [
        ("recipe hash", *(summary["recipe_hash"] for summary in summaries))]
    versions = [{**one.get("versions", {}), "commit": one.get("commit", "")} for one in made]
    gained, lost, both = _documents(first, second)
    return Difference([entry for entry in settings if entry[1] != entry[2]], origin.differences(*versions),
                      _inputs(first, second), _counts(*summaries), gained, lost, both)


def _summary(place: Store) -> dict[str, Any]:
    try:
        found: dict[str, Any] = place.read_json(replace.SUMMARY)
    except FileNotFoundError:
        raise InputError("no summary.json: no pipeline has finished here", where=place.uri,
                         mend="give two folders that `tidewheel data run` has written to") from None
    return found


def _inputs(first: Store, second: Store) -> dict[str, int]:
    """Files by what became of them; the same content under another name is the same file."""
    before, now = ({line["fingerprint"]: line["file"] for line in origin.read_inputs(place)}
                   for place in (first, second))
    gone = {name for content, name in before.items() if content not in now}
    come = {name for content, name in now.items() if content not in before}
    return {"same": len(before.keys() & now.keys()), "changed": len(gone & come), "gained": len(come - gone),
            "lost": len(gone - come)}


def _counts(before: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of counts: what each stage kept, and the sets."""
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
    """(documents gained, documents lost, documents in both)."""
    sets = [_sets(place) for place in (first, second)]
    total = sum(each.documents for one in sets for each in one)
    shares = max(1, -(-total // AT_A_TIME))
    gained, lost, both = Moved(), Moved(), 0
    for share in range(shares):
        before, now = (np.unique(_hashes(one, share, shares)) for one in sets)
        both += len(np.intersect1d(before, now, assume_unique=True))
        for moved, new, mine, other in ((gained, np.setdiff1d(now, before, assume_unique=True), sets[1], first),
                                        (lost, np.setdiff1d(before, now, assume_unique=True), sets[0], second)):
            if len(new):
                _tell(moved, new, mine, other)
    return gained, lost, both


def _tell(moved: Moved, hashes: np.ndarray, sets: Sequence[_Set], other: Store) -> None:
    """Add documents with these hashes to `moved`, with what the other output says of them."""
    moved.count += len(hashes)
    explained = np.zeros(len(hashes), bool)
    for stage, reasons, found in _dropped(other):
        place = np.searchsorted(hashes, found).clip(max=len(hashes) - 1)
        hit = (hashes[place] == found) & ~explained[place]
        explained[place[hit]] = True
        for reason in reasons.filter(pa.array(hit)).to_pylist():
            moved.reasons[f"{stage}: {reason}"] += 1
    if rest := int((~explained).sum()):
        moved.reasons[NOT_READ] += rest
    for ids in _ids(sets):
        if len(moved.examples) >= EXAMPLES:
            break
        known = np.isin(verdicts.hash_ids(ids), hashes)
        names = dict.fromkeys([*moved.examples, *ids.filter(pa.array(known)).to_pylist()])  # each once, in order
        moved.examples = list(names)[:EXAMPLES]


def _dropped(place: Store) -> Iterator[tuple[str, pa.ChunkedArray, np.ndarray]]:
    """(stage, reasons, hashes of ids) of the documents that an output dropped, file by file."""
    for file in place.list("verdicts"):
        if file.key.endswith(".parquet"):
            data = read_file(place, Stamp(file.key, file.bytes, place.hash(file.key)))
            table = verdicts.decode(data, ["id", "verdict", "reason"])
            table = table.filter(pa.compute.equal(table["verdict"], verdicts.DROP))
            if len(table):
                yield file.key.split("/")[1], table["reason"], verdicts.hash_ids(table["id"])


@dataclass(frozen=True)
class _Set:
    """Documents of an output: how many, and their ids, of which some may come several times."""

    documents: int
    ids: Callable[[], Iterator[pa.Array]]


def _sets(place: Store) -> list[_Set]:
    """The training and the validation set; of an output without them, the product."""
    if not place.child(SETS[0]).exists(KEY) and place.child(product.FOLDER).exists(product.MANIFEST):
        written = place.child(product.FOLDER)
        return [_Set(product.read_manifest(written)["documents"], functools.partial(product.ids, written))]
    found = [(place.child(name), read_manifest(place.child(name))) for name in SETS]
    return [_Set(manifest.documents, functools.partial(_packed_ids, child, manifest)) for child, manifest in found]


def _hashes(sets: Sequence[_Set], share: int, shares: int) -> np.ndarray:
    """Hashes of the ids of one share of the documents, uint64."""
    found = [np.zeros(0, np.uint64)]
    for ids in _ids(sets):
        hashes = verdicts.hash_ids(ids)
        found.append(np.unique(hashes[hashes % np.uint64(shares) == share] if shares > 1 else hashes))
    return np.concatenate(found)


def _ids(sets: Sequence[_Set]) -> Iterator[pa.Array]:
    """Ids of the documents of all sets; one whose tokens are in several rows comes several times."""
    for each in sets:
        yield from each.ids()


def _packed_ids(place: Store, manifest: Manifest) -> Iterator[pa.Array]:
    if manifest.kind == PACKED:
        shards = ShardSet.open(place.uri)
        for number in range(len(manifest.shards)):
            yield shards.shard(number).batch.column("document_ids").flatten()
    else:
        for batch in preferences.read_pairs(place.uri):
            yield batch.column("document_id")
