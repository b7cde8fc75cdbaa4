"""Index of evaluation items that decontamination searches documents with.

Readings: different tools split an item into different words, so it has several readings: as it is, without apostrophes,
without any ASCII punctuation ("don't" as "don t" and "dont"), and with JSON's escapes (a line break becomes a letter n
before the next word). Equal readings are stored once, and long readings that differ in few words too, because the
alignment tolerates the difference. An answer of at least `ANSWER_WORDS` words that is not part of the question has its
own readings. An item with fewer than `SPELLED` words with letters is a formula: its numbers prove nothing, so every
character between them has to match too.

Weights: the weight of a word is its information in bits, -log2 of its frequency. Occurrences are counted once per
different surrounding words in the items, so that a template of a thousand items counts once, and blended with typical
frequencies in English. Words that occur only in n-grams of `STOCK_WORDS` words that many items share have less weight,
down to 1/10 at `STOCK_ITEMS` items.

Seeds: n-grams that start an alignment. Items shorter than `eval_kernels.LONG` words have every 3-gram and the 2-grams
of two rare words as seeds; longer ones have every 5-gram. A seed of many items refers to the shortest of them.
"""

from __future__ import annotations

import io
import json
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel.data import text
from tidewheel.data.decontaminate import eval_kernels
from tidewheel.data.decontaminate.evals import EvalItem, fingerprints

MIN_WORDS = 5  # items with fewer words are not searched for: a phrase is no evidence
SPELLED = 3  # an item with fewer words with letters is a formula
SYMBOLS = 4  # a formula with fewer symbols is not searched for
ANSWER_WORDS = 13  # shorter answers are no evidence without their question
STOCK_WORDS = 4
STOCK_ITEMS = 32
STOCK_WEIGHT = 0.1
SEED_BITS = {2: 21.0, 3: 23.0, 5: 15.0}  # minimum information of a seed, by its length
SEED_ITEMS = {2: 16, 3: 48, 5: 32}  # maximum number of readings of a seed, by its length
LIKENESS = 0.9  # a long reading that shares this part of its words with an earlier one is not stored
_PRIOR_WORDS = 20_000.0  # weight of typical frequencies, in words, against counted ones
_PRIOR = 2.0**-13  # typical frequency of a word that is not in `_FREQUENT`
_SYMBOL_PRIOR = 2.0**-8  # the same of numbers and single letters
_SYMBOL_BITS = 3.0  # maximum weight of numbers and single letters
_MAX_BITS = 14.0  # maximum weight of other words
_FILTER_BITS = 16  # bits of a filter per n-gram, so that most lookups end at the filter
_FREQUENT = """
    the of and to a in is it you that he was for on are with as i his they be at one have this from or had by but what
    some we can out other were all there when up use your how said an each she which do their if will way about many
    then them would like so these her see him two has more could no make than been its who now my did get not any may
    only new also into most after over such where those being through""".split()  # noqa: SIM905


@dataclass(frozen=True)
class EvalIndex:
    """Arrays of k items, r readings and w words for `eval_kernels.find`. They are read-only and cheap to share.

    Args:
        names: benchmark of each item [k].
        items: id of each item [k].
        item: item of each reading, int64 [r].
        kind: part of the item that a reading is of (`eval_kernels.QUESTION`, ...), int8 [r].
        formulas: `core` of each reading that is a formula, otherwise empty [r].
        words: low half of the hash of each word, uint32 [w].
        weights: weight of each word, float32 [w].
        offsets: reading i has the words [offsets[i], offsets[i + 1]), int64 [r + 1].
        totals: sum of the weights of each reading, float64 [r].
        bits: running sums of information from 0, for each reading, float32 [w + r].
        spelled: running sums of words with letters from 0, for each reading, int32 [w + r].
        signatures: set of the low 7 bits of the words of each reading, uint64 [2r].
        known: bitset of all words, uint64.
        pairs: bitset of all 2-grams, uint64.
        filter_2, filter_3, filter_5: bitsets of the seeds of each length, uint64.
        keys: keys of an open-addressing table of n-grams, uint64; 0 is free.
        grams: n-gram of each key, int64.
        gram_length: words of each n-gram, int8 [g].
        post_offsets: n-gram i has the postings [post_offsets[i], post_offsets[i + 1]), int64 [g + 1].
        post_reading: reading of each posting, int32.
        post_place: position of the n-gram in the reading, int32.
        sets: `fingerprints` of the items.
    """

    names: np.ndarray
    items: np.ndarray
    item: np.ndarray
    kind: np.ndarray
    formulas: np.ndarray
    words: np.ndarray
    weights: np.ndarray
    offsets: np.ndarray
    totals: np.ndarray
    bits: np.ndarray
    spelled: np.ndarray
    signatures: np.ndarray
    known: np.ndarray
    pairs: np.ndarray
    filter_2: np.ndarray
    filter_3: np.ndarray
    filter_5: np.ndarray
    keys: np.ndarray
    grams: np.ndarray
    gram_length: np.ndarray
    post_offsets: np.ndarray
    post_reading: np.ndarray
    post_place: np.ndarray
    sets: tuple[dict[str, object], ...] = ()

    @classmethod
    def build(cls, items: Sequence[EvalItem]) -> EvalIndex:
        """Return the index of `items`; their order does not change the result."""
        items = sorted(items, key=lambda item: (item.name, item.item, item.text, item.answer))
        item, kind, texts = _readings(items)
        words = text.words(texts, keep_digits=True)
        bits, spelled = _information(texts, words)
        formula = (_sums(spelled, words.offsets) < SPELLED) & (kind == eval_kernels.QUESTION)
        kind[formula] = eval_kernels.FORMULA
        weights = bits * _stock(words, item)
        sizes = np.diff(words.offsets)
        reading = np.repeat(np.arange(len(sizes)), sizes)
        signatures = np.zeros((len(sizes), 2), np.uint64)
        low = words.hashes & np.uint64(127)
        np.bitwise_or.at(signatures, (reading, (low >> np.uint64(6)).astype(np.int64)),
                         np.uint64(1) << (low & np.uint64(63)))
        seeds = {length: _seeds(words, bits, sizes, reading, length) for length in eval_kernels.SEED_LENGTHS}
        keys, gram_length, post_offsets, post_reading, post_place = _postings(seeds, sizes)
        table, grams = _table(keys)
        return cls(
            names=_objects([entry.name for entry in items]), items=_objects([entry.item for entry in items]),
            item=item, kind=kind, formulas=_objects([core(value) or "\0" if flag else "" for value, flag in zip(
                texts, formula.tolist(), strict=True)]),
            words=(words.hashes & np.uint64(0xFFFFFFFF)).astype(np.uint32), weights=weights.astype(np.float32),
            offsets=words.offsets, totals=_sums(weights, words.offsets), bits=_running(bits, words.offsets, np.float32),
            spelled=_running(spelled, words.offsets, np.int32), signatures=signatures.reshape(-1),
            known=_bitset(words.hashes), pairs=_bitset(_windows(words, 2)[0]),
            **{f"filter_{length}": _bitset(keys[gram_length == length]) for length in eval_kernels.SEED_LENGTHS},
            keys=table, grams=grams, gram_length=gram_length, post_offsets=post_offsets, post_reading=post_reading,
            post_place=post_place, sets=fingerprints(items))

    def to_bytes(self) -> bytes:
        """Return the index as an Arrow IPC stream of one row."""
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
        """Return the index that `to_bytes` wrote."""
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
_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"))
_NO_APOSTROPHE = str.maketrans("", "", "'\u2019\u2018`")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + "\u2018\u2019\u201c\u201d")


def _readings(items: Sequence[EvalItem]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return (item int64 [r], kind int8 [r], text) of each reading; texts of too few words have none."""
    questions = text.normalise([item.text for item in items], keep_digits=True).to_pylist()
    answers = text.normalise([item.answer for item in items], keep_digits=True).to_pylist()
    own_answers = ["" if answer in question else item.answer
                   for item, question, answer in zip(items, questions, answers, strict=True)]
    readings = [(index, eval_kernels.QUESTION, reading)
                for index, reading in _variants([item.text for item in items], MIN_WORDS)]
    readings += [(index, eval_kernels.ANSWER, reading) for index, reading in _variants(own_answers, ANSWER_WORDS)]
    return (np.array([index for index, _, _ in readings], np.int64),
            np.array([kind for _, kind, _ in readings], np.int8),
            [reading for _, _, reading in readings])


def _variants(texts: list[str], min_words: int) -> Iterator[tuple[int, str]]:
    """Yield (index of the text, reading) for texts of at least `min_words` words."""
    variants = [texts, [value.translate(_NO_APOSTROPHE) for value in texts],
                [value.translate(_NO_PUNCTUATION) for value in texts],
                [json.dumps(value, ensure_ascii=False)[1:-1] for value in texts]]
    words_of = [[value.split() for value in text.normalise(column, keep_digits=True).to_pylist()]
                for column in variants]
    for index in range(len(texts)):
        kept: list[list[str]] = []
        for words, column in zip((column[index] for column in words_of), variants, strict=True):
            if len(words) >= min_words and not any(_are_similar(words, other) for other in kept):
                kept.append(words)
                yield index, column[index]


def core(value: str) -> str:
    """Return the part of a formula that must match exactly: from its first word to its last, without white space.

    Case and kinds of dashes do not matter. The core of a text with fewer than `SYMBOLS` symbols is empty, because a
    sequence of numbers is no evidence.
    """
    inner = "".join(value.split()).casefold().translate(_DASHES).strip(string.punctuation)
    return inner if sum(not letter.isalnum() for letter in inner) >= SYMBOLS else ""


def _are_similar(words: list[str], other: list[str]) -> bool:
    if words == other or len(words) < eval_kernels.LONG:
        return words == other
    rest = set(other)
    return sum(word in rest for word in words) >= LIKENESS * max(len(words), len(other))


def _information(texts: list[str], words: text.Words) -> tuple[np.ndarray, np.ndarray]:
    """Return the information of each word, float64 [w], and whether it has letters, bool [w].

    A word has letters if it contains at least two or an ideograph, or is in `_FREQUENT`.
    """
    unique, first, word = np.unique(words.hashes, return_index=True, return_inverse=True)
    before = np.roll(word, 1)  # the neighbours of a text's first and last words may be those of another text
    after = np.roll(word, -1)
    surroundings = np.unique(np.stack([word, before, after]), axis=1)[0]
    counts = np.bincount(surroundings, minlength=len(unique)).astype(np.float64)
    spellings = " ".join(text.normalise(texts, keep_digits=True).to_pylist()).split()
    distinct = [spellings[index] for index in first]
    rank = {value: index for index, value in enumerate(_FREQUENT)}
    letters = np.array([sum(map(str.isalpha, value)) >= 2 or (value.isalpha() and not value.isascii())
                        or value in rank for value in distinct], bool)
    typical = np.array([0.1 / (rank[value] + 1.5) if value in rank else _PRIOR if letter else _SYMBOL_PRIOR
                        for value, letter in zip(distinct, letters, strict=True)])
    frequency = (counts + _PRIOR_WORDS * typical) / (counts.sum() + _PRIOR_WORDS)
    bits = np.clip(-np.log2(frequency), 1.0, np.where(letters, _MAX_BITS, _SYMBOL_BITS))
    return bits[word], letters[word]


def _stock(words: text.Words, item: np.ndarray) -> np.ndarray:
    """Return a factor in (0, 1] for each word: less than 1 if all its n-grams of `STOCK_WORDS` are in several texts."""
    factor = np.zeros(len(words.hashes))
    hashes, reading, first = _windows(words, STOCK_WORDS)
    if len(hashes):
        _, gram = np.unique(hashes, return_inverse=True)
        texts = _same_text(words)[reading]
        pairs = np.unique(np.stack([gram, texts]), axis=1)[0]
        text_counts = np.bincount(pairs)[gram]
        value = np.maximum(1.0 - np.log(text_counts) / np.log(STOCK_ITEMS), STOCK_WEIGHT)
        for step in range(STOCK_WORDS):
            np.maximum.at(factor, first + step, value)
    return np.where(factor > 0, factor, 1.0)


def _same_text(words: text.Words) -> np.ndarray:
    """Return the first reading with the same words as each reading, int64 [r]."""
    first: dict[bytes, int] = {}
    bounds = zip(words.offsets[:-1].tolist(), words.offsets[1:].tolist(), strict=True)
    return np.array([first.setdefault(words.hashes[begin:end].tobytes(), reading)
                     for reading, (begin, end) in enumerate(bounds)], np.int64)


def _windows(words: text.Words, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (key uint64, reading, index of the first word) of all n-grams of one length."""
    sizes = np.maximum(np.diff(words.offsets) - length + 1, 0)
    reading = np.repeat(np.arange(len(sizes)), sizes)
    first = words.offsets[reading] + np.arange(len(reading)) - (np.cumsum(sizes) - sizes)[reading]
    keys = np.empty(len(reading), np.uint64)
    eval_kernels.gram_keys(text.frozen(words.hashes), text.frozen(first), length, keys)
    return keys, reading, first


def _seeds(words: text.Words, bits: np.ndarray, sizes: np.ndarray, reading: np.ndarray, length: int
           ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (key, reading, position in the reading) of the seeds of one length."""
    keys, reading, first = _windows(words, length)
    running = np.concatenate([[0.0], np.cumsum(bits)])
    is_seed = running[first + length] - running[first] >= SEED_BITS[length]
    if length < 5:
        is_seed &= sizes[reading] < eval_kernels.LONG
    return keys[is_seed], reading[is_seed], (first - words.offsets[reading])[is_seed]


def _postings(seeds: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]], sizes: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (keys [g], lengths [g], post_offsets [g + 1], post_reading, post_place), with the shortest readings."""
    key = np.concatenate([entry[0] for entry in seeds.values()])
    reading = np.concatenate([entry[1] for entry in seeds.values()])
    position = np.concatenate([entry[2] for entry in seeds.values()])
    length = np.concatenate([np.full(len(entry[0]), length, np.int8) for length, entry in seeds.items()])
    order = np.lexsort((position, reading, sizes[reading], key))
    key, reading, position, length = (column[order] for column in (key, reading, position, length))
    _, first, counts = np.unique(key, return_index=True, return_counts=True)
    rank = np.arange(len(key)) - np.repeat(first, counts)
    kept = rank < np.array([SEED_ITEMS.get(value, 0) for value in range(max(SEED_ITEMS) + 1)])[length]
    kept &= (length == max(SEED_ITEMS)) | np.repeat(counts <= max(SEED_ITEMS.values()), counts)
    key, reading, position, length = (column[kept] for column in (key, reading, position, length))
    unique, first = np.unique(key, return_index=True)
    offsets = np.append(first, len(key))
    return unique, length[first], offsets.astype(np.int64), reading.astype(np.int32), position.astype(np.int32)


def _table(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return an open-addressing table of n-grams: (keys uint64, n-gram of each key int64)."""
    size = 1 << max(int(2 * len(keys)).bit_length(), 4)
    table = np.zeros(size, np.uint64)
    grams = np.zeros(size, np.int64)
    eval_kernels.insert(text.frozen(keys), table, grams)
    return table, grams


def _bitset(keys: np.ndarray) -> np.ndarray:
    """Return a bitset of the low bits of `keys`, uint64; its number of bits is a power of two."""
    keys = np.unique(keys)
    size = 1 << max(int(_FILTER_BITS * len(keys)).bit_length(), 6)
    bits = np.zeros(size, bool)
    bits[(keys & np.uint64(size - 1)).astype(np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.uint64)


def _running(values: np.ndarray, offsets: np.ndarray, dtype: Any) -> np.ndarray:
    """Return running sums that start at 0 for each reading [w + r]."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    sizes = np.diff(offsets) + 1
    reading = np.repeat(np.arange(len(sizes)), sizes)
    word = np.arange(len(reading)) - reading
    return (total[word] - total[offsets[reading]]).astype(dtype)


def _sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the sum of the values of each reading [r]."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return total[offsets[1:]] - total[offsets[:-1]]


def _objects(values: list[str]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array
