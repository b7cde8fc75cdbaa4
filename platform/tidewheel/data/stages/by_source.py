"""Count documents and bytes of text by source after each stage, so that a report shows which sources lost most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from tidewheel.versions import Version

VERSION = Version("by_source")
UNIT_SOURCES = 256
"""Sources that a unit counts one by one; a crawl may have as many sources as documents."""
REPORT_SOURCES = 40
OTHER = "(other sources)"

BySource = dict[str, list[int]]
"""{source: [documents, bytes]}."""


def tally(names: pa.ChunkedArray | pa.Array, sizes: pa.ChunkedArray | pa.Array) -> BySource:
    """Count documents and bytes by source; beyond `UNIT_SOURCES` sources the smallest are added up as `OTHER`.

    Args:
        names: source of each of n documents.
        sizes: bytes of text of each document, int64 [n].
    """
    table = pa.table({"source": names, "bytes": sizes})
    sums = table.group_by("source").aggregate([([], "count_all"), ("bytes", "sum")])
    rows = zip(sums["source"].to_pylist(), sums["count_all"].to_pylist(), sums["bytes_sum"].to_pylist(), strict=True)
    return largest({name: [documents, size or 0] for name, documents, size in rows}, UNIT_SOURCES)


def merge(parts: Iterable[Mapping[str, Sequence[int]]]) -> BySource:
    """Return the sum of several counts."""
    total: BySource = {}
    for part in parts:
        for name, (documents, size) in part.items():
            entry = total.setdefault(name, [0, 0])
            entry[0] += documents
            entry[1] += size
    return dict(sorted(total.items()))


def largest(counts: BySource, limit: int) -> BySource:
    """Return the `limit` sources with most documents, the others added up as `OTHER`; sorted by name."""
    names = sorted(counts, key=lambda name: (name == OTHER, -counts[name][0], name))
    return restricted(counts, names[:limit])


def restricted(counts: Mapping[str, Sequence[int]], names: Iterable[str]) -> BySource:
    """Return the counts of `names`, the others added up as `OTHER`."""
    known = set(names)
    return merge({name if name in known else OTHER: entry} for name, entry in counts.items())


def total(counts: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Return (documents, bytes) over all sources."""
    return sum(entry[0] for entry in counts.values()), sum(entry[1] for entry in counts.values())


def by_stage(stages: Sequence[tuple[str, BySource]]) -> list[dict[str, Any]]:
    """Return the entry of `summary.json`: the counts after each stage, in order.

    The sources are those with most documents in the first stage.
    """
    if not stages:
        return []
    names = list(largest(stages[0][1], REPORT_SOURCES))
    return [{"stage": stage, "left": restricted(counts, names)} for stage, counts in stages]
