"""Finding evaluation items in documents by rare word n-grams.

Words are those of `text` with digits kept. An item of m words is indexed by n-grams of one length: `ngram`
(13) when it has at least four times as many words, from twice as many by five eighths of it (8), below by two
fifths (5): so a short item is found too and one changed word does not hide it. Items shorter than that are not
searched for (a word is no evidence), nor do n-grams count in which less than a third of the words have two
letters (numbers, formulas). An n-gram found in many different items is a stock phrase: its weight falls with the
logarithm of that number, to 0 at `STOCK_ITEMS`.

A word of an item weighs as much as the heaviest n-gram over it. The score of (document, item) is the share of
that weight covered by the item's n-grams found close together in the document; a document is contaminated
from `MIN_SCORE`, when at least `MIN_WORDS` words are covered (or the item's every word, if it has fewer).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numba
import numpy as np
import pyarrow as pa

from tidewheel.data import text
from tidewheel.data.evals import EvalItem, fingerprints, read_eval_items

__all__ = ["EvalIndex", "EvalItem", "Match", "contaminated", "fingerprints", "read_eval_items"]

DECONTAMINATE_VERSION = f"{text.TEXT_VERSION}+digits/ngrams-1"
MIN_SCORE = 0.4
MIN_WORDS = 8
MIN_NGRAM = 5  # words; items shorter than the shortest n-gram in use are not searched for
STOCK_ITEMS = 32
_FILTER_BITS = 16  # bits of the filter per n-gram, so that most probes end there
_POLYNOMIAL = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class Match:
    """The best match of a document: the item, the document's own words that match, and the score in (0, 1]."""

    benchmark: str
    item: str
    text: str
    score: float


@dataclass(frozen=True)
class EvalIndex:
    """Lookup structure over items; read-only arrays, cheap to share between processes.

    names, items: benchmark and id of each item [k]; item_words, item_length int64 [k]: words, n-gram length;
    item_weight float64 [k]: sum of word weights. word_weights float32 with word_offsets [k+1].
    lengths int64: the n-gram lengths in use. keys uint64 and grams int64: open-addressing table, key 0 free.
    post_offsets [g+1], post_item, post_place: where n-gram g occurs. filter uint64: bitset of the keys' low bits.
    """

    names: np.ndarray
    items: np.ndarray
    item_words: np.ndarray
    item_length: np.ndarray
    item_weight: np.ndarray
    word_weights: np.ndarray
    word_offsets: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray
    grams: np.ndarray
    post_offsets: np.ndarray
    post_item: np.ndarray
    post_place: np.ndarray
    filter: np.ndarray
    sets: tuple[dict[str, object], ...] = ()

    @classmethod
    def build(cls, items: Sequence[EvalItem], ngram: int = 13) -> EvalIndex:
        """Index `items` (the result does not depend on their order).

        Raises:
            ValueError: ngram below `MIN_NGRAM`.
        """
        if ngram < MIN_NGRAM:
            raise ValueError(f"ngram must be at least {MIN_NGRAM}, got {ngram}")
        return _build(cls, sorted(items, key=lambda item: (item.name, item.item, item.text)), ngram)

    def to_bytes(self) -> bytes:
        """The index as an Arrow IPC stream, one row."""
        columns: dict[str, pa.Array] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "sets":
                columns["sets"] = pa.array([[dict(entry) for entry in value]], _SETS_TYPE)
            else:
                values = pa.array(value.tolist(), pa.string()) if value.dtype.kind in "UO" else pa.array(value)
                columns[field.name] = pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
        table = pa.table(columns)
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> EvalIndex:
        """The index that `to_bytes` wrote."""
        table = pa.ipc.open_stream(data).read_all()
        values: dict[str, Any] = {}
        for name in table.column_names:
            if name == "sets":
                values[name] = tuple(table[name][0].as_py())
            else:
                column = table[name].chunk(0).values
                values[name] = _objects(column.to_pylist()) if pa.types.is_string(column.type) else column.to_numpy()
        return cls(**values)


_SETS_TYPE = pa.list_(pa.struct([("name", pa.string()), ("hash", pa.string()), ("items", pa.int64())]))


def contaminated(index: EvalIndex, texts: text.Texts, *, min_score: float = MIN_SCORE,
                 min_words: int = MIN_WORDS) -> list[Match | None]:
    """The best match of each document, or None. Ties go to the item first in (benchmark, id) order."""
    found: list[Match | None] = [None] * len(texts)
    data, offsets = text.buffers(texts)
    powers = np.array([pow(int(_POLYNOMIAL), int(length), 1 << 64) for length in index.lengths], np.uint64)
    for first, _, words in text.scan(texts, keep_digits=True):
        documents, places, grams = _find(index, words, powers)
        for document, item, score, begin, end in _best(index, documents, places, grams, min_score, min_words):
            base = int(words.offsets[document])
            source = data[offsets[first + document] :]
            piece = source[words.starts[base + begin] : words.ends[base + end - 1]].tobytes().decode("utf-8", "replace")
            found[first + document] = Match(str(index.names[item]), str(index.items[item]), piece, score)
    return found


def _find(index: EvalIndex, words: text.Words, powers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(document, word place, n-gram) of every occurrence of an indexed n-gram."""
    room = 4096
    lengths, steps, keys, grams, bits = (text.frozen(table) for table in (
        index.lengths, powers, index.keys, index.grams, index.filter))
    while True:
        hits = np.empty((3, room), np.int64)
        count = _lookup(words.hashes, words.offsets, lengths, steps, keys, grams, bits, hits)
        if count <= room:
            return hits[0, :count], hits[1, :count], hits[2, :count]
        room = int(count)


def _best(index: EvalIndex, documents: np.ndarray, places: np.ndarray, grams: np.ndarray, min_score: float,
          min_words: int) -> list[tuple[int, int, float, int, int]]:
    """(document, item, score, first word, end word) of the best item of each contaminated document."""
    repeats = index.post_offsets[grams + 1] - index.post_offsets[grams]
    hit = np.repeat(np.arange(len(grams)), repeats)
    posting = np.arange(len(hit)) - np.repeat(np.cumsum(repeats) - repeats, repeats) + index.post_offsets[grams[hit]]
    item, item_place = index.post_item[posting], index.post_place[posting]
    document, place = documents[hit], places[hit]
    order = np.lexsort((item_place, place, item, document))
    document, item, place, item_place = document[order], item[order], place[order], item_place[order]
    # a new cluster where the document, the item, or the neighbourhood changes
    fresh = np.ones(len(order), bool)
    fresh[1:] = ((document[1:] != document[:-1]) | (item[1:] != item[:-1])
                 | (place[1:] - place[:-1] > index.item_words[item[1:]]))
    starts = np.nonzero(fresh)[0]
    ends = np.append(starts[1:], len(order))
    needed = np.minimum(index.item_words[item[starts]], min_words)
    enough = (ends - starts) * index.item_length[item[starts]] >= needed  # an upper bound on covered words
    best: dict[int, tuple[int, int, float, int, int]] = {}
    for start, end in zip(starts[enough].tolist(), ends[enough].tolist(), strict=True):
        which, where = int(item[start]), int(document[start])
        length, total = int(index.item_length[which]), int(index.item_words[which])
        covered = np.zeros(total, bool)
        for at in np.unique(item_place[start:end]).tolist():
            covered[at : at + length] = True
        if covered.sum() < min(total, min_words):
            continue
        weights = index.word_weights[index.word_offsets[which] : index.word_offsets[which + 1]]
        score = round(float(weights[covered].sum(dtype=np.float64) / index.item_weight[which]), 6)
        if score >= min_score and (where not in best or score > best[where][2]):
            best[where] = (where, which, score, int(place[start]), int(place[end - 1]) + length)
    return list(best.values())


def _build(cls: type[EvalIndex], items: list[EvalItem], ngram: int) -> EvalIndex:
    texts = [item.text for item in items]
    words = text.words(texts, keep_digits=True)
    sizes = np.diff(words.offsets)
    shortest, middle = max(ngram * 2 // 5, MIN_NGRAM), max(ngram * 5 // 8, MIN_NGRAM)
    own = np.where(sizes >= 4 * ngram, ngram, np.where(sizes >= 2 * ngram, middle, shortest))
    own = np.where(sizes < shortest, 0, own)  # too short to tell from chance
    lengths = np.unique(own[own > 0]).astype(np.int64)
    spelled = np.concatenate([[0], np.cumsum(_spelled(texts))])
    text_of = _first_equal([words.hashes[a:b].tobytes() for a, b in zip(words.offsets[:-1], words.offsets[1:])])

    keys, gram_item, gram_place, weights = [], [], [], []
    for length in lengths.tolist():
        hashes, item, place = _windows(words, length)
        if not len(hashes):
            continue
        unique, inverse = np.unique(hashes, return_inverse=True)
        pairs = np.sort(inverse * len(items) + text_of[item])
        pairs = pairs[np.diff(pairs, prepend=-1) != 0]  # one count for each different text
        spread = np.bincount(pairs // len(items), minlength=len(unique))
        weight = np.maximum(1.0 - np.log(spread) / np.log(STOCK_ITEMS), 0.0)[inverse]
        first_word = words.offsets[item] + place
        telling = spelled[first_word + length] - spelled[first_word] >= (length + 2) // 3
        mine = (own[item] == length) & (weight > 0) & telling
        keys.append(hashes[mine])
        gram_item.append(item[mine])
        gram_place.append(place[mine])
        weights.append(weight[mine])
    key, item_of, place_of, weight_of = (_join(part) for part in (keys, gram_item, gram_place, weights))

    word_weights = np.zeros(len(words.hashes), np.float32)
    for step in range(int(lengths.max(initial=0))):  # the step-th word of each n-gram: no word twice in one go
        mine = own[item_of] > step
        at = words.offsets[item_of[mine]] + place_of[mine] + step
        word_weights[at] = np.maximum(word_weights[at], weight_of[mine])
    running = np.concatenate([[0.0], np.cumsum(word_weights, dtype=np.float64)])
    totals = running[words.offsets[1:]] - running[words.offsets[:-1]]
    unique, order_of = np.unique(key.astype(np.uint64), return_inverse=True)
    order = np.argsort(order_of, kind="stable")
    table, grams, bits = _table(unique)
    return cls(
        names=_objects([item.name for item in items]), items=_objects([item.item for item in items]),
        item_words=sizes.astype(np.int64), item_length=own.astype(np.int64),
        item_weight=totals, word_weights=word_weights, word_offsets=words.offsets,
        lengths=lengths, keys=table, grams=grams, filter=bits,
        post_offsets=np.searchsorted(order_of[order], np.arange(len(unique) + 1)).astype(np.int64),
        post_item=item_of[order].astype(np.int64), post_place=place_of[order].astype(np.int64),
        sets=fingerprints(items))


def _objects(values: list[str]) -> np.ndarray:
    found = np.empty(len(values), object)
    found[:] = values
    return found


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _spelled(texts: list[str]) -> np.ndarray:
    """[w] bool: words with two letters or more, or an ideograph; numbers and single symbols identify nothing."""
    normal = text.normalise(texts, keep_digits=True).to_pylist()
    return np.array([sum(map(str.isalpha, word)) >= 2 or (word.isalpha() and not word.isascii())
                     for item in normal for word in item.split(" ") if word], bool)


def _first_equal(values: list[bytes]) -> np.ndarray:
    """[k] int64: index of the first value equal to each."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(value, place) for place, value in enumerate(values)], np.int64)


def _windows(words: text.Words, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hash, item, place) of all n-grams of one length."""
    sizes = np.maximum(np.diff(words.offsets) - length + 1, 0)
    item = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(item)) - (np.cumsum(sizes) - sizes)[item]
    hashes = np.empty(len(item), np.uint64)
    _window_hashes(words.hashes, words.offsets[item] + place, length, hashes)
    return hashes, item, place


def _table(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(keys, grams, filter) of the open-addressing table; sizes are powers of two."""
    size = 1 << max(int(2 * len(keys)).bit_length(), 4)
    bits = 1 << max(int(_FILTER_BITS * len(keys)).bit_length(), 6)
    table, grams, filter_bits = np.zeros(size, np.uint64), np.zeros(size, np.int64), np.zeros(bits // 64, np.uint64)
    _insert(keys, table, grams, filter_bits)
    return table, grams, filter_bits


@numba.njit(nogil=True)
def _mix(h, length):
    """Final 64-bit hash of a window of `length` words; never 0, which marks a free slot."""
    h = (h ^ np.uint64(length)) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    h = h ^ (h >> np.uint64(33))
    return h if h != 0 else np.uint64(1)


@numba.njit(nogil=True, cache=True)
def _window_hashes(words, starts, length, out):
    for i in range(len(starts)):
        h = np.uint64(0)
        for j in range(length):
            h = h * _POLYNOMIAL + words[starts[i] + j]
        out[i] = _mix(h, length)


@numba.njit(nogil=True, cache=True)
def _insert(keys, table, grams, filter_bits):
    mask, filter_mask = np.uint64(len(table) - 1), np.uint64(len(filter_bits) * 64 - 1)
    for gram in range(len(keys)):
        key = keys[gram]
        bit = key & filter_mask
        filter_bits[bit >> np.uint64(6)] |= np.uint64(1) << (bit & np.uint64(63))
        slot = (key >> np.uint64(20)) & mask
        while table[slot] != 0:
            slot = (slot + np.uint64(1)) & mask
        table[slot] = key
        grams[slot] = gram


@numba.njit(nogil=True, cache=True)
def _lookup(words, offsets, lengths, powers, table, grams, filter_bits, hits):
    """Fill hits [3, room] (document, place, n-gram); returns how many there are, also beyond the room."""
    mask, filter_mask = np.uint64(len(table) - 1), np.uint64(len(filter_bits) * 64 - 1)
    room = hits.shape[1]
    count = 0
    for document in range(len(offsets) - 1):
        base, size = offsets[document], offsets[document + 1] - offsets[document]
        for which in range(len(lengths)):
            length = lengths[which]
            h = np.uint64(0)
            for i in range(size):
                h = h * _POLYNOMIAL + words[base + i]
                if i >= length:
                    h = h - powers[which] * words[base + i - length]
                if i + 1 < length:
                    continue
                key = _mix(h, length)
                bit = key & filter_mask
                if (filter_bits[bit >> np.uint64(6)] >> (bit & np.uint64(63))) & np.uint64(1) == 0:
                    continue
                slot = (key >> np.uint64(20)) & mask
                while table[slot] != 0 and table[slot] != key:
                    slot = (slot + np.uint64(1)) & mask
                if table[slot] == key:
                    if count < room:
                        hits[0, count], hits[1, count], hits[2, count] = document, i + 1 - length, grams[slot]
                    count += 1
    return count
