"""Choice of the duplicates to drop: exact groups, candidate pairs from MinHash bands, and the final decision.

A total order of documents decides: higher priority, then higher quality, then longer text, then smaller id. Missing or
NaN quality is the lowest. All functions are pure, and the order of their input rows does not change the result.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data.text.kernel_tools import compiled
from tidewheel.versions import Version

VERSION = Version("dedup")
"""Version of the rule that decides which duplicate is kept."""
ORDER = (("priority", "descending"), ("quality", "descending"), ("length", "descending"), ("id", "ascending"))
ORDER_COLUMNS = (("id", pa.string()), ("priority", pa.int64()), ("quality", pa.float32()), ("length", pa.int64()))
KEY_SCHEMA = pa.schema([("hash_hi", pa.uint64()), ("hash_lo", pa.uint64()), *ORDER_COLUMNS])
KEY_COLUMNS = tuple(KEY_SCHEMA.names)
BAND_SCHEMA = pa.schema([("band", pa.int32()), ("hash", pa.uint64()), *ORDER_COLUMNS])
FATE_SCHEMA = pa.schema([("id", pa.string()), ("kept", pa.bool_())])
EDGE_SCHEMA = pa.schema([("a", pa.string()), ("b", pa.string())])
SCORED_EDGE_SCHEMA = pa.schema([*EDGE_SCHEMA, ("score", pa.float64())])
DROPPED_SCHEMA = pa.schema([("id", pa.string()), ("survivor", pa.string()), ("score", pa.float64())])

NEIGHBOURS = 3
"""Pairs of each document with the next-worse documents of its bucket, besides the pair with the best one."""


def exact_duplicates(keys: pa.Table) -> pa.Table:
    """Return the exact duplicates to drop (`DROPPED_SCHEMA`), sorted by id, with score 1.0.

    The best document of each group with equal (hash_hi, hash_lo) survives. Rows that share an id are one document and
    not duplicates of each other.

    Args:
        keys: rows of one hash partition (`KEY_SCHEMA`).
    """
    table = _sorted(keys, "hash_hi", "hash_lo")
    hashes = [table[name].to_numpy() for name in ("hash_hi", "hash_lo")]
    head = _group_heads(hashes)
    ids = table["id"].combine_chunks()
    survivors = ids.take(pa.array(head))
    dropped = pc.and_(pa.array(head != np.arange(len(head))), pc.not_equal(ids, survivors))
    duplicates = pa.table({"id": ids.filter(dropped), "survivor": survivors.filter(dropped)})
    duplicates = duplicates.group_by(["id", "survivor"]).aggregate([]).sort_by("id")
    scores = pa.array(np.ones(len(duplicates)))
    return pa.table([duplicates["id"], duplicates["survivor"], scores], schema=DROPPED_SCHEMA)


def band_candidates(bands: pa.Table, *, neighbours: int = NEIGHBOURS) -> pa.Table:
    """Return candidate pairs (`EDGE_SCHEMA`), sorted and distinct, where document a is better than document b.

    In each bucket (band, hash), the best document is paired with every other document. In addition, each document is
    paired with its `neighbours` next-worse ones, because the best document may be in the bucket by chance while two
    others are copies. There are at most (1 + neighbours) pairs per row.

    Args:
        bands: rows of one band partition (`BAND_SCHEMA`).
        neighbours: number of next-worse documents to pair each document with.
    """
    table = _sorted(bands, "band", "hash")
    head = _group_heads([table[name].to_numpy() for name in ("band", "hash")])
    encoded = table["id"].combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy().astype(np.int64)
    count = len(codes)
    rows = np.arange(count)
    better = [codes[head]]
    worse = [codes]
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


def cluster(edges: pa.Table, dropped: pa.Table | None = None) -> pa.Table:
    """Return the documents to drop (`DROPPED_SCHEMA`), sorted by id, given verified edges between similar documents.

    The rule is greedy along the total order: a document is dropped if and only if an edge connects it to a better
    document that is kept. Every dropped document is therefore similar to a survivor, and chains of similar documents
    do not merge into one large cluster. The result is unique, because a decision depends only on better documents.
    If a document has several kept neighbours, its survivor is the most similar one, then the one with the smaller id.

    Args:
        edges: `SCORED_EDGE_SCHEMA`, where a is better than b. All scores have passed the threshold; the highest score
            of a repeated edge counts.
        dropped: documents that are already dropped (`settle`); the result includes them.

    Raises:
        ValueError: the edges contradict a total order (a cycle, or a document better than itself).
    """
    dropped = DROPPED_SCHEMA.empty_table() if dropped is None else dropped
    if len(edges) == 0:
        return dropped.sort_by("id")
    columns = [edges["a"], edges["b"], dropped["id"], dropped["survivor"]]
    joined = pa.concat_arrays([pc.cast(column.combine_chunks(), pa.string()) for column in columns])
    unique = joined.unique()
    names = pa.table({"plain": plain_ids(unique), "id": unique}).sort_by([("plain", "ascending"), ("id", "ascending")])
    ordered = names["id"].combine_chunks()
    codes = pc.index_in(joined, ordered).to_numpy().astype(np.int64)
    better, worse, known, best, _ = np.split(codes, np.cumsum([len(column) for column in columns]))
    survivor = np.full(len(ordered), -1, np.int64)
    survivor[known] = best
    score = np.zeros(len(ordered))
    score[known] = dropped["score"].to_numpy()
    order = np.lexsort((worse, better))
    starts = np.searchsorted(better[order], np.arange(len(ordered) + 1))
    scores = edges["score"].to_numpy().astype(np.float64)
    decided = _decide(starts.astype(np.int64), worse[order], scores[order], survivor, score)
    if decided != len(ordered):
        raise ValueError("edges contradict a total order: they form a cycle")
    losers = np.nonzero(survivor >= 0)[0]
    return pa.table([ordered.take(pa.array(losers)), ordered.take(pa.array(survivor[losers])),
                     pa.array(score[losers])], schema=DROPPED_SCHEMA).sort_by("id")


def settle(edges: pa.Table, dropped: pa.Table, fates: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Run one round of `cluster` on one partition of edges, which are partitioned by their worse document.

    Rounds with new fates repeat until no partition has edges left. The dropped documents of all partitions are then
    those that `cluster` returns for all edges. The greedy rule is a lexicographically first maximal independent set: a
    random order needs O(log^2 n) rounds (Blelloch, Fineman and Shun 2012), but a chain in order of quality needs one
    round per document.

    Args:
        edges: undecided edges of this partition (`SCORED_EDGE_SCHEMA`).
        dropped: documents that this partition has dropped so far (`DROPPED_SCHEMA`). While edges to a document remain,
            its survivor may change, but it stays dropped.
        fates: decisions about the better documents `a` of the edges (`FATE_SCHEMA`), from `fates`.

    Returns:
        (undecided edges, dropped documents), both sorted.
    """
    kept = pc.take(fates["kept"].combine_chunks(), pc.index_in(edges["a"], value_set=fates["id"].combine_chunks()))
    decisive = edges.filter(pc.fill_null(kept, False))
    claims = pa.table([decisive["b"], decisive["a"], decisive["score"]], schema=DROPPED_SCHEMA)
    claims = pa.concat_tables([dropped, claims])
    claims = claims.append_column("plain", plain_ids(claims["survivor"])).sort_by(
        [("id", "ascending"), ("score", "descending"), ("plain", "ascending"), ("survivor", "ascending")])
    head = _group_heads([claims["id"].combine_chunks().dictionary_encode().indices.to_numpy()])
    dropped = claims.filter(pa.array(head == np.arange(len(head)))).drop_columns(["plain"])
    left = edges.filter(pc.is_null(kept))
    indices = pc.index_in(left["b"], value_set=dropped["id"].combine_chunks())
    best = pc.take(dropped["score"].combine_chunks(), indices)
    names = pc.take(plain_ids(dropped["survivor"]), indices)
    wins = pc.or_(pc.greater(left["score"], best), pc.and_(
        pc.equal(left["score"], best), pc.less(plain_ids(left["a"]), names)))
    left = left.filter(pc.fill_null(wins, True))  # null: the document is not dropped yet
    return left.sort_by([("b", "ascending"), ("a", "ascending"), ("score", "ascending")]), dropped


def fates(ids: pa.Array, edges: pa.Table, dropped: pa.Table) -> pa.Table:
    """Return the decisions (`FATE_SCHEMA`) that one partition has made about documents; see `settle`.

    Args:
        ids: ids of documents of this partition.
        edges: undecided edges of this partition (`SCORED_EDGE_SCHEMA`).
        dropped: documents that this partition has dropped so far (`DROPPED_SCHEMA`).
    """
    is_dropped = pc.is_in(ids, value_set=dropped["id"].combine_chunks())
    undecided = pc.and_(pc.is_in(ids, value_set=edges["b"].combine_chunks()), pc.invert(is_dropped))
    return pa.table([ids, pc.invert(is_dropped)], schema=FATE_SCHEMA).filter(pc.invert(undecided))


#: Prefix of the ids of documents of an earlier dump, within a run: NUL, number of its index, NUL. Ids contain no NUL.
_OLD = "^\x00[0-9]+\x00"


def old_ids(ids: pa.Array | pa.ChunkedArray, index: int) -> pa.Array | pa.ChunkedArray:
    """Return ids of documents of an earlier dump, marked with the number of its index.

    The mark distinguishes them from documents of this run with the same id.
    """
    return pc.binary_join_element_wise(f"\x00{index}\x00", ids.cast(pa.string()), "")


def plain_ids(ids: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return ids without the prefix from `old_ids`."""
    return pc.replace_substring_regex(ids, _OLD, "") if pc.any(is_old(ids)).as_py() else ids


def index_of(identity: str) -> int | None:
    """Return the number of the index in an id that `old_ids` returned; None for an id of this run."""
    return int(identity[1:].split("\x00", 1)[0]) if identity.startswith("\x00") else None


def is_old(ids: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return which ids come from `old_ids`, as a Boolean array."""
    return pc.starts_with(ids, "\x00")


def _sorted(table: pa.Table, *groups: str) -> pa.Table:
    keys = [(name, "ascending") for name in groups]
    indices = pc.sort_indices(_nan_as_null(table), sort_keys=[*keys, *ORDER])
    return table.take(indices)


def _nan_as_null(table: pa.Table) -> pa.Table:
    """Replace NaN qualities by null, so that both sort below every number."""
    quality = table["quality"]
    clean = pc.if_else(pc.is_nan(quality), pa.scalar(None, quality.type), quality)
    return table.set_column(table.column_names.index("quality"), "quality", clean)


def _group_heads(columns: list[np.ndarray]) -> np.ndarray:
    """Return the first row with equal values in `columns` for each row of a sorted table, int64 [n]."""
    count = len(columns[0])
    first = np.ones(count, bool)
    if count:
        first[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.maximum.accumulate(np.where(first, np.arange(count), 0)) if count else np.zeros(0, np.int64)


@compiled
def _decide(starts, worse, scores, survivor, score):
    """Decide nodes in topological order: edges of node a are worse[starts[a]:starts[a+1]], nodes are in id order.

    Fills survivor [n] int64 (-1: kept, otherwise dropped) and score [n]. Returns the number of decided nodes, which is
    less than n if there is a cycle.
    """
    count = len(starts) - 1
    waiting = np.zeros(count, np.int64)
    for b in worse:
        waiting[b] += 1
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
    return decided
