"""Documents and bytes of text by source: what each stage leaves, so that a report shows from whom it took most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from tidewheel.versions import Version

VERSION = Version("by_source")
UNIT_SOURCES = 256  # told one by one in a unit's counts; a crawl may have as many sources as documents
REPORT_SOURCES = 40
OTHER = "(other sources)"

#: {source: [documents, bytes]}
BySource = dict[str, list[int]]


def tally(names: pa.ChunkedArray | pa.Array, sizes: pa.ChunkedArray | pa.Array) -> BySource:
    """Documents by source, and their bytes; beyond `UNIT_SOURCES` the smallest are one, `OTHER`.

    Args:
        names: source of each of n documents.
        sizes: bytes of text of each, int64.
    """
    table = pa.table({"source": names, "bytes": sizes})
    found = table.group_by("source").aggregate([([], "count_all"), ("bytes", "sum")])
    rows = zip(found["source"].to_pylist(), found["count_all"].to_pylist(), found["bytes_sum"].to_pylist(), strict=True)
    return largest({name: [documents, size or 0] for name, documents, size in rows}, UNIT_SOURCES)


def merge(parts: Iterable[Mapping[str, Sequence[int]]]) -> BySource:
    """The sum of several."""
    total: BySource = {}
    for part in parts:
        for name, (documents, size) in part.items():
            entry = total.setdefault(name, [0, 0])
            entry[0] += documents
            entry[1] += size
    return dict(sorted(total.items()))


def largest(found: BySource, limit: int) -> BySource:
    """The `limit` sources with most documents, the others added up as `OTHER`; sorted by name."""
    names = sorted(found, key=lambda name: (name == OTHER, -found[name][0], name))
    return restricted(found, names[:limit])


def restricted(found: Mapping[str, Sequence[int]], names: Iterable[str]) -> BySource:
    """Only `names`, the others added up as `OTHER`."""
    known = set(names)
    return merge({name if name in known else OTHER: entry} for name, entry in found.items())


def total(found: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """(documents, bytes) over all sources."""
    return sum(entry[0] for entry in found.values()), sum(entry[1] for entry in found.values())


def by_stage(stages: Sequence[tuple[str, BySource]]) -> list[dict[str, Any]]:
    """For summary.json: what each stage leaves, in order; the sources are those with most documents in the first."""
    if not stages:
        return []
    names = list(largest(stages[0][1], REPORT_SOURCES))
    return [{"stage": stage, "left": restricted(found, names)} for stage, found in stages]
