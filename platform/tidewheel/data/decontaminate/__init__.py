"""Search for evaluation items in documents: seeds of a few words, then an alignment weighted by rarity.

Words are those of `text` with digits kept. Around each n-gram that a document shares with an item (`eval_index`), the
item is aligned with the document, with a cost for each changed, missing or additional word. The best stretch is a match
(`Rules`) if it is

- nearly the whole item: at least 2/3 of its words and of its weight, and at least 7 words. A short item is found with
  one word changed, but a phrase that it shares with many others is not enough; or
- a part: almost half of the words of an item of 20 words or more, with little in between. The weight does not matter,
  so half of a template is found too.

Items of 5 to 7 words match only as a whole, and formulas (`eval_index`) only exactly. Other matches need at least
`Rules.bits` of information, so common words in a common order are no evidence. Numbers and single letters carry hardly
any information.

References: n-gram overlap as in Brown et al. 2020 (GPT-3, appendix C); rarity weights and the tolerance for edits as in
AI2's decon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from tidewheel.data import text
from tidewheel.data.decontaminate import eval_kernels
from tidewheel.data.decontaminate.eval_index import EvalIndex, core
from tidewheel.data.decontaminate.evals import EvalItem, fingerprints, read_eval_items

__all__ = ["EvalIndex", "EvalItem", "Match", "Rules", "contaminated", "find", "fingerprints", "read_eval_items"]


@dataclass(frozen=True)
class Rules:
    """Thresholds that make an alignment a match, in the order that `eval_kernels` expects."""

    bits: float = 30.0
    """Minimum information of the matching words."""
    spelled: float = 3.0
    """Minimum number of matching words with letters."""
    short: float = 8.0
    """Items with fewer words match only as a whole."""
    words: float = 7.0
    """Minimum number of matching words of a nearly whole item."""
    share: float = 0.7
    """Minimum share of a nearly whole item's words that match."""
    density: float = 0.66
    """Minimum share of matching words among the document's words from the first match to the last."""
    weight: float = 0.7
    """Minimum share of a nearly whole item's weight that matches."""
    ngram: float = 13.0
    """Minimum number of matching words of a part, unless `part_words` of the item is less."""
    part: float = 0.4
    """Minimum share of the item's words that a part contains."""
    part_words: float = 0.45
    """A part of an item with few words needs this share of them instead of `ngram` words."""
    part_item: float = 20.0
    """Parts of items with fewer words do not match."""
    part_density: float = 0.8
    """As `density`, for a part."""
    least_weight: float = 35.0
    """Minimum weight of the matching words of a nearly whole item."""
    short_weight: float = 45.0
    """Minimum weight of an item that matches only as a whole."""
    answer: float = 0.8
    """Minimum share of an answer's words if it matches without its question; its density is `part_density`."""

    def limits(self) -> np.ndarray:
        """Return the thresholds as a read-only array, float64 [15]."""
        return text.frozen(np.array([getattr(self, field.name) for field in fields(self)]))


@dataclass(frozen=True)
class Match:
    """Match of an item in a document.

    Args:
        benchmark: name of the item's benchmark.
        item: id of the item in the benchmark.
        text: words of the document, from the first match to the last.
        score: share of the item's weight that matches, in (0, 1].
        start: first byte of `text` in the document's UTF-8 bytes.
        end: byte after `text`.
    """

    benchmark: str
    item: str
    text: str
    score: float
    start: int
    end: int


def contaminated(index: EvalIndex, texts: text.Texts, rules: Rules = Rules()) -> list[Match | None]:
    """Return the best match of each document, or None. Of equal matches, the first by benchmark and id wins.

    Args:
        index: the items.
        texts: the documents.
        rules: thresholds of a match.
    """
    return [min(matches, key=lambda match: (-match.score, match.benchmark, match.item, match.start), default=None)
            for matches in find(index, texts, rules)]


def find(index: EvalIndex, texts: text.Texts, rules: Rules = Rules()) -> list[list[Match]]:
    """Return all matches of each document by position, without overlapping matches of one item.

    Args:
        index: the items.
        texts: the documents.
        rules: thresholds of a match.
    """
    data, offsets = text.buffers(texts)
    matches: list[list[Match]] = [[] for _ in range(len(offsets) - 1)]
    for document, item, start, end, score, formula in _matches(index, texts, rules):
        piece = data[offsets[document] + start : offsets[document] + end].tobytes().decode("utf-8", "replace")
        if formula and core(piece) != formula:
            continue
        matches[document].append(Match(str(index.names[item]), str(index.items[item]), piece, score, start, end))
    return matches


def _matches(index: EvalIndex, texts: text.Texts, rules: Rules) -> Iterator[tuple[int, int, int, int, float, str]]:
    """Yield (document, item, first byte, byte after the match, score, formula), with the readings of an item merged."""
    limits = rules.limits()
    postings = _tables(index, "gram_length", "post_offsets", "post_reading", "post_place")
    readings = (*_tables(index, "words", "weights", "totals", "bits", "spelled", "offsets", "kind"),
                text.frozen(index.signatures.reshape(-1, 2)))
    room = 1024
    for first, _, words in text.scan(texts, keep_digits=True):
        seeds = _seeds(index, words)
        while True:
            hits, weights = np.empty((4, room), np.int64), np.empty(room)
            count = eval_kernels.find(text.frozen(words.hashes), text.frozen(words.offsets), seeds, postings,
                                      readings, limits, hits, weights)
            if count <= room:
                break
            room = int(count)
        document, reading, begin, end = hits[:, :count]
        score = np.round(weights[:count] / np.maximum(index.totals[reading], 1e-9), 6)
        item = index.item[reading]
        base = words.offsets[document]
        start, stop = words.starts[base + begin], words.ends[base + end - 1]
        order = np.lexsort((-stop, start, -score, item, document))
        last: tuple[int, int, int] | None = None
        kept_matches = []
        for row in order.tolist():  # keep the best of overlapping readings of an item
            if last is not None and last[:2] == (document[row], item[row]) and start[row] < last[2]:
                continue
            last = (document[row], item[row], stop[row])
            kept_matches.append((int(document[row]) + first, int(item[row]), int(start[row]), int(stop[row]),
                                 min(float(score[row]), 1.0), str(index.formulas[reading[row]])))
        yield from sorted(kept_matches, key=lambda match: (match[0], match[2], match[1]))


def _tables(index: EvalIndex, *names: str) -> tuple[np.ndarray, ...]:
    return tuple(text.frozen(getattr(index, name)) for name in names)


def _seeds(index: EvalIndex, words: text.Words) -> np.ndarray:
    """Return (document, first word, n-gram) of every seed in the documents, int64 [3, s]."""
    tables = _tables(index, "known", "pairs", "filter_2", "filter_3", "filter_5", "keys", "grams")
    room = len(words.hashes) // 8 + 64
    while True:
        hits = np.empty((3, room), np.int64)
        count = eval_kernels.seed_hits(text.frozen(words.hashes), text.frozen(words.offsets), tables, hits)
        if count <= room:
            return text.frozen(np.ascontiguousarray(hits[:, :count]))
        room = int(count)
