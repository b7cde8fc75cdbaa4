"""Which of several copies goes: exact groups, candidate pairs from MinHash bands, and the final choice.

The total order of documents decides, never arrival: higher priority, then higher quality, then longer
text, then smaller id (missing or NaN quality is the lowest). All functions are pure and give the same
rows for any order of their input.
"""

from __future__ import annotations

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

ORDER = (("priority", "descending"), ("quality", "descending"), ("length", "descending"), ("id", "ascending"))
ORDER_COLUMNS = (("id", pa.string()), ("priority", pa.int32()), ("quality", pa.float32()), ("length", pa.int64()))
KEY_SCHEMA = pa.schema([("hash_hi", pa.uint64()), ("hash_lo", pa.uint64()), *ORDER_COLUMNS])
KEY_COLUMNS = tuple(KEY_SCHEMA.names)
BAND_SCHEMA = pa.schema([("band", pa.int32()), ("hash", pa.uint64()), *ORDER_COLUMNS])
EDGE_SCHEMA = pa.schema([("a", pa.string()), ("b", pa.string())])
SCORED_EDGE_SCHEMA = pa.schema([*EDGE_SCHEMA, ("score", pa.float64())])
DROPPED_SCHEMA = pa.schema([("id", pa.string()), ("survivor", pa.string()), ("score", pa.float64())])

NEIGHBOURS = 3  # candidates of each document with its next-worse ones in a bucket, beside the star


def exact_duplicates(keys: pa.Table) -> pa.Table:
    """Rows of one hash partition (`KEY_SCHEMA`) -> `DROPPED_SCHEMA`, sorted by id, score 1.0.

    In each group of equal (hash_hi, hash_lo) the best of the total order survives. Rows that share
    one id are one document: none of them is reported as a duplicate of the others.
    """
    table = _sorted(keys, "hash_hi", "hash_lo")
    hashes = [table[name].to_numpy() for name in ("hash_hi", "hash_lo")]
    head = _group_heads(hashes)
    ids = table["id"].combine_chunks()
    survivors = ids.take(pa.array(head))
    dropped = pc.and_(pa.array(head != np.arange(len(head))), pc.not_equal(ids, survivors))
    found = pa.table({"id": ids.filter(dropped), "survivor": survivors.filter(dropped)})
    found = found.group_by(["id", "survivor"]).aggregate([]).sort_by("id")
    scores = pa.array(np.ones(len(found)))
    return pa.table([found["id"], found["survivor"], scores], schema=DROPPED_SCHEMA)


def band_candidates(bands: pa.Table, *, neighbours: int = NEIGHBOURS) -> pa.Table:
    """Rows of one band partition (`BAND_SCHEMA`) -> candidate pairs (`EDGE_SCHEMA`), a better than b.

    Each bucket (band, hash) gives a star from its best document to every other, and pairs of each
    document with its `neighbours` next-worse ones, because the best one of a bucket may be there by
    chance while two others are copies. At most (1 + neighbours) pairs a row, deduplicated, sorted.
    """
    table = _sorted(bands, "band", "hash")
    head = _group_heads([table[name].to_numpy() for name in ("band", "hash")])
    encoded = table["id"].combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy().astype(np.int64)
    count = len(codes)
    rows = np.arange(count)
    better, worse = [codes[head]], [codes]
    for distance in range(1, neighbours + 1):
        same = head[distance:] == head[: max(count - distance, 0)]
        better.append(codes[: max(count - distance, 0)][same])
        worse.append(codes[rows[distance:]][same])
    size = max(len(encoded.dictionary), 1)
    packed = np.sort(np.concatenate(better) * size + np.concatenate(worse))
    packed = packed[(np.diff(packed, prepend=-1) != 0) & (packed // size != packed % size)]
    names = encoded.dictionary
    edges = pa.table([names.take(pa.array(packed // size)), names.take(pa.array(packed % size))], schema=EDGE_SCHEMA)
    return edges.sort_by([("a", "ascending"), ("b", "ascending")])


def cluster(edges: pa.Table) -> pa.Table:
    """Verified edges (`SCORED_EDGE_SCHEMA`, a better than b) -> documents to drop (`DROPPED_SCHEMA`).

    The rule, greedy along the total order: a document is dropped when it has a verified edge to a
    better document that is kept; otherwise it is kept. So every dropped document is similar to a
    document that survives, and the score is that edge's: nothing goes by a chain of resemblances, and
    a cluster cannot explode. The outcome is unique, because a document's fate rests on better ones only.
    Of several kept neighbours the recorded survivor is the most similar, then the one with the smaller id.
    Give only edges whose score passed the threshold; of repeated edges the highest score counts.

    Raises:
        ValueError: the edges contradict one total order (a cycle, or a document better than itself).
    """
    if len(edges) == 0:
        return DROPPED_SCHEMA.empty_table()
    joined = pa.concat_arrays([pc.cast(edges[side].combine_chunks(), pa.string()) for side in ("a", "b")])
    names = pc.sort_indices(unique := joined.unique())
    ordered = unique.take(names)
    codes = pc.index_in(joined, ordered).to_numpy().astype(np.int64)
    better, worse = codes[: len(edges)], codes[len(edges) :]
    scores = edges["score"].to_numpy().astype(np.float64)
    order = np.lexsort((worse, better))
    starts = np.searchsorted(better[order], np.arange(len(ordered) + 1))
    survivor, score, decided = _decide(starts.astype(np.int64), worse[order], scores[order])
    if decided != len(ordered):
        raise ValueError("edges contradict a total order: some document is, by way of others, better than itself")
    dropped = np.nonzero(survivor >= 0)[0]
    return pa.table([ordered.take(pa.array(dropped)), ordered.take(pa.array(survivor[dropped])),
                     pa.array(score[dropped])], schema=DROPPED_SCHEMA)


def _sorted(table: pa.Table, *groups: str) -> pa.Table:
    keys = [(name, "ascending") for name in groups]
    indices = pc.sort_indices(_nan_as_null(table), sort_keys=[*keys, *ORDER])
    return table.take(indices)


def _nan_as_null(table: pa.Table) -> pa.Table:
    """NaN and missing quality sort alike, below every number."""
    quality = table["quality"]
    clean = pc.if_else(pc.is_nan(quality), pa.scalar(None, quality.type), quality)
    return table.set_column(table.column_names.index("quality"), "quality", clean)


def _group_heads(columns: list[np.ndarray]) -> np.ndarray:
    """[n] int64: for each row of a sorted table, the first row with equal values in `columns`."""
    count = len(columns[0])
    first = np.ones(count, bool)
    if count:
        first[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.maximum.accumulate(np.where(first, np.arange(count), 0)) if count else np.zeros(0, np.int64)


@numba.njit(nogil=True, cache=True)
def _decide(starts, worse, scores):
    """Topological pass: edges of node a are worse[starts[a]:starts[a+1]]. Nodes are numbered in id order.

    Returns survivor [n] (-1 = kept), score [n], and how many nodes were decided (fewer than n: a cycle).
    """
    count = len(starts) - 1
    waiting = np.zeros(count, np.int64)
    for b in worse:
        waiting[b] += 1
    survivor = np.full(count, -1, np.int64)
    score = np.zeros(count, np.float64)
    queue = np.empty(count, np.int64)
    filled = 0
    for node in range(count):
        if waiting[node] == 0:
            queue[filled] = node
            filled += 1
    decided = 0
    while decided < filled:
        a = queue[decided]
        decided += 1
        for edge in range(starts[a], starts[a + 1]):
            b = worse[edge]
            if survivor[a] < 0 and (survivor[b] < 0 or scores[edge] > score[b]
                                    or (scores[edge] == score[b] and a < survivor[b])):
                survivor[b] = a
                score[b] = scores[edge]
            waiting[b] -= 1
            if waiting[b] == 0:
                queue[filled] = b
                filled += 1
    return survivor, score, decided
