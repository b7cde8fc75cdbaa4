"""Which of several copies goes: exact groups, candidate pairs from MinHash bands, and the final choice.

The total order of documents decides, never arrival: higher priority, then higher quality, then longer
text, then smaller id (missing or NaN quality is the lowest). All functions are pure and give the same
rows for any order of their input.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data.text.kernel_tools import compiled
from tidewheel.versions import Version

VERSION = Version("dedup")
"""Which of several duplicates is kept."""
ORDER = (("priority", "descending"), ("quality", "descending"), ("length", "descending"), ("id", "ascending"))
ORDER_COLUMNS = (("id", pa.string()), ("priority", pa.int64()), ("quality", pa.float32()), ("length", pa.int64()))
KEY_SCHEMA = pa.schema([("hash_hi", pa.uint64()), ("hash_lo", pa.uint64()), *ORDER_COLUMNS])
KEY_COLUMNS = tuple(KEY_SCHEMA.names)
BAND_SCHEMA = pa.schema([("band", pa.int32()), ("hash", pa.uint64()), *ORDER_COLUMNS])
FATE_SCHEMA = pa.schema([("id", pa.string()), ("kept", pa.bool_())])
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


def cluster(edges: pa.Table, dropped: pa.Table | None = None) -> pa.Table:
    """Verified edges (`SCORED_EDGE_SCHEMA`, a better than b) -> documents to drop (`DROPPED_SCHEMA`).

    The rule, greedy along the total order: a document is dropped when it has a verified edge to a
    better document that is kept; otherwise it is kept. So every dropped document is similar to a
    document that survives, and the score is that edge's: nothing goes by a chain of resemblances, and
    a cluster cannot explode. The outcome is unique, because a document's fate rests on better ones only.
    Of several kept neighbours the recorded survivor is the most similar, then the one with the smaller id.
    Give only edges whose score passed the threshold; of repeated edges the highest score counts.

    Args:
        edges: the edges.
        dropped: documents of which it is known already (`settle`); they come out again, with what edges add.

    Raises:
        ValueError: the edges contradict one total order (a cycle, or a document better than itself).
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
    survivor, score = np.full(len(ordered), -1, np.int64), np.zeros(len(ordered))
    survivor[known], score[known] = best, dropped["score"].to_numpy()
    order = np.lexsort((worse, better))
    starts = np.searchsorted(better[order], np.arange(len(ordered) + 1))
    scores = edges["score"].to_numpy().astype(np.float64)
    decided = _decide(starts.astype(np.int64), worse[order], scores[order], survivor, score)
    if decided != len(ordered):
        raise ValueError("edges contradict a total order: some document is, by way of others, better than itself")
    gone = np.nonzero(survivor >= 0)[0]
    return pa.table([ordered.take(pa.array(gone)), ordered.take(pa.array(survivor[gone])),
                     pa.array(score[gone])], schema=DROPPED_SCHEMA).sort_by("id")


def settle(edges: pa.Table, dropped: pa.Table, fates: pa.Table) -> tuple[pa.Table, pa.Table]:
    """One round of `cluster` where its edges are spread over many places by their worse document.

    Repeated with new fates until no edge is left anywhere, the dropped documents of all places are `cluster` of all
    edges. The greedy rule is a lexicographically first maximal independent set; rounds over a random order number
    O(log^2 n) (Blelloch, Fineman and Shun 2012), a chain in order of quality takes one for each of its documents.

    Args:
        edges: `SCORED_EDGE_SCHEMA`, those of one place that earlier rounds left.
        dropped: `DROPPED_SCHEMA`, what is dropped there so far. As long as edges to a document are left, its survivor
            may change, its fate may not.
        fates: `FATE_SCHEMA`, of documents `a` of the edges that are decided (`fates`).

    Returns:
        (edges that are left, dropped), sorted.
    """
    kept = pc.take(fates["kept"].combine_chunks(), pc.index_in(edges["a"], value_set=fates["id"].combine_chunks()))
    found = edges.filter(pc.fill_null(kept, False))
    claims = pa.table([found["b"], found["a"], found["score"]], schema=DROPPED_SCHEMA)
    claims = pa.concat_tables([dropped, claims])
    claims = claims.append_column("plain", plain_ids(claims["survivor"])).sort_by(
        [("id", "ascending"), ("score", "descending"), ("plain", "ascending"), ("survivor", "ascending")])
    head = _group_heads([claims["id"].combine_chunks().dictionary_encode().indices.to_numpy()])
    dropped = claims.filter(pa.array(head == np.arange(len(head)))).drop_columns(["plain"])
    left = edges.filter(pc.is_null(kept))
    places = pc.index_in(left["b"], value_set=dropped["id"].combine_chunks())
    best = pc.take(dropped["score"].combine_chunks(), places)
    names = pc.take(plain_ids(dropped["survivor"]), places)
    wins = pc.or_(pc.greater(left["score"], best), pc.and_(
        pc.equal(left["score"], best), pc.less(plain_ids(left["a"]), names)))
    left = left.filter(pc.fill_null(wins, True))  # null: the document is not dropped so far
    return left.sort_by([("b", "ascending"), ("a", "ascending"), ("score", "ascending")]), dropped


def fates(ids: pa.Array, edges: pa.Table, dropped: pa.Table) -> pa.Table:
    """`FATE_SCHEMA` of those documents among `ids` that are decided at the place they belong to (see `settle`)."""
    gone = pc.is_in(ids, value_set=dropped["id"].combine_chunks())
    waiting = pc.and_(pc.is_in(ids, value_set=edges["b"].combine_chunks()), pc.invert(gone))
    return pa.table([ids, pc.invert(gone)], schema=FATE_SCHEMA).filter(pc.invert(waiting))


#: Ids of documents of an earlier dump, within a run: NUL, the number of its index, NUL, the id. No id has a NUL itself.
_OLD = "^\x00[0-9]+\x00"


def old_ids(ids: pa.Array | pa.ChunkedArray, index: int) -> pa.Array | pa.ChunkedArray:
    """Ids of index number `index`, as they go through this run: another document here may have the same id."""
    return pc.binary_join_element_wise(f"\x00{index}\x00", ids.cast(pa.string()), "")


def plain_ids(ids: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Ids without what `old_ids` put before them."""
    return pc.replace_substring_regex(ids, _OLD, "") if pc.any(is_old(ids)).as_py() else ids


def index_of(identity: str) -> int | None:
    """Number of the index that `old_ids` was given for this id; None for an id of this run."""
    return int(identity[1:].split("\x00", 1)[0]) if identity.startswith("\x00") else None


def is_old(ids: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """True for ids that `old_ids` made."""
    return pc.starts_with(ids, "\x00")


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


@compiled
def _decide(starts, worse, scores, survivor, score):
    """Topological pass: edges of node a are worse[starts[a]:starts[a+1]]. Nodes are numbered in id order.

    Fills in survivor [n] int64 (-1 = kept, the rest is dropped) and score [n]. Returns how many nodes were decided
    (fewer than n: a cycle).
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
