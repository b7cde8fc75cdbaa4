"""Compiled search for evaluation items in the words of documents: first seeds, then an alignment around enough of them.

The kernels run in nopython mode without the GIL and take tables as arguments, which `eval_index` describes.
"""

from __future__ import annotations

import numba
import numpy as np

from tidewheel.data.text.kernel_tools import compiled

QUESTION, ANSWER, FORMULA = 0, 1, 2  # kinds of readings; a formula has hardly any words with letters
SEED_LENGTHS = (2, 3, 5)  # words of the n-grams that `find` looks up
LONG = 24  # an item with at least this many words is aligned if its 5-grams cover `LONG_COVERED` nearby words
LONG_COVERED = 8
_SLACK = 6  # an item may gain or lose this many words around a seed, plus a twelfth of its length
_MATCH, _GAP = 2, 1  # alignment: gain of an equal word, cost of a changed, lost or gained one
_POLYNOMIAL = np.uint64(0xD6E8FEB86659FD93)
_FMIX_1, _FMIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_S6, _S20, _S33, _S63 = np.uint64(6), np.uint64(20), np.uint64(33), np.uint64(63)
_ONE, _LOW32 = np.uint64(1), np.uint64(0xFFFFFFFF)


@numba.njit(nogil=True)
def _mixed(h):
    """Return the hash of an n-gram from its polynomial; never 0, which marks a free slot."""
    h = (h ^ (h >> _S33)) * _FMIX_1
    h = (h ^ (h >> _S33)) * _FMIX_2
    h = h ^ (h >> _S33)
    return h if h != 0 else _ONE


@compiled
def gram_keys(words, starts, length, out):
    """Compute the keys uint64 [n] of the n-grams of `length` words at `starts` int64 [n]."""
    for i in range(len(starts)):
        h = np.uint64(length)
        for j in range(starts[i], starts[i] + length):
            h = h * _POLYNOMIAL + words[j]
        out[i] = _mixed(h)


@compiled
def insert(keys, table, grams):
    """Fill an open-addressing table (uint64, a power of two long, 0 is free) with keys; grams: index of the key."""
    mask = np.uint64(len(table) - 1)
    for gram in range(len(keys)):
        slot = (keys[gram] >> _S20) & mask
        while table[slot] != 0:
            slot = (slot + _ONE) & mask
        table[slot] = keys[gram]
        grams[slot] = gram


@numba.njit(nogil=True)
def _has(bits, key):
    bit = key & np.uint64(len(bits) * 64 - 1)
    return (bits[bit >> _S6] >> (bit & _S63)) & _ONE != 0


@numba.njit(nogil=True)
def _gram(table, grams, key):
    """Return the index of a key; -1 if it is not in the table."""
    mask = np.uint64(len(table) - 1)
    slot = (key >> _S20) & mask
    while table[slot] != 0:
        if table[slot] == key:
            return grams[slot]
        slot = (slot + _ONE) & mask
    return np.int64(-1)


@numba.njit(nogil=True)
def _enough_words(words, low, high, signature, needed):
    """Return whether at least `needed` words of [low, high) may be in the item with this 128-bit set of words."""
    count = np.int64(0)
    for i in range(low, high):
        bit = words[i] & np.uint64(127)
        count += np.int64((signature[bit >> _S6] >> (bit & _S63)) & _ONE)
        if count >= needed:
            return True
    return False


@numba.njit(nogil=True)
def _align(words, low, high, item, weights, origin, band, rows, gains, best):
    """Find the best local alignment of item words uint32 [L] with document words [low, high), near the diagonal.

    origin: the document's word opposite the item's first word; band: how far the two may drift apart.
    rows int32 [2, 5, 2 * band + 2]: scratch; gains float64 [2, 2 * band + 2]: scratch.
    Fills best int64 [5]: number of equal words, first and end in the document, first and end in the item. Returns the
    weight of the equal words.
    """
    width = 2 * band + 1
    rows[:, 0, : width + 1] = 0
    top = 0
    weight = 0.0
    best[:] = 0
    for j in range(len(item)):
        new, old = j & 1, (j & 1) ^ 1
        target, gain = item[j], weights[j]
        left = 0  # score of the previous cell of this row
        for k in range(width):
            i = origin + j + k - band
            if i < low or i >= high:
                rows[new, 0, k] = 0
                left = 0
                continue
            equal = np.uint32(words[i] & _LOW32) == target
            diagonal = rows[old, 0, k] if j > 0 else 0
            above = (rows[old, 0, k + 1] if j > 0 and k + 1 < width else 0) - _GAP
            beside = left - _GAP
            step = diagonal + _MATCH if equal else diagonal - _GAP
            if step >= above and step >= beside:
                score = step
                if score > 0:
                    if diagonal > 0:
                        count, first, first_item = rows[old, 1, k], rows[old, 2, k], rows[old, 3, k]
                        total = gains[old, k]
                    else:
                        count, first, first_item, total = 0, i, j, 0.0
                    rows[new, 1, k] = count + equal
                    rows[new, 2, k], rows[new, 3, k] = first, first_item
                    gains[new, k] = total + gain * equal
            elif above >= beside:
                score = above
                if score > 0:
                    rows[new, 1, k], rows[new, 2, k] = rows[old, 1, k + 1], rows[old, 2, k + 1]
                    rows[new, 3, k], gains[new, k] = rows[old, 3, k + 1], gains[old, k + 1]
            else:
                score = beside
                if score > 0:
                    rows[new, 1, k], rows[new, 2, k] = rows[new, 1, k - 1], rows[new, 2, k - 1]
                    rows[new, 3, k], gains[new, k] = rows[new, 3, k - 1], gains[new, k - 1]
            score = max(score, 0)
            rows[new, 0, k] = score
            left = score
            if score > top:
                top = score
                weight = gains[new, k]
                best[0], best[1], best[2] = rows[new, 1, k], rows[new, 2, k], i + 1
                best[3], best[4] = rows[new, 3, k], j + 1
    return weight


@numba.njit(nogil=True)
def _accepted(best, weight, length, total, bits, spelled, kind, limits):
    """Return whether an alignment is a match; `decontaminate` documents the rules."""
    equal, span = best[0], best[2] - best[1]
    if kind == FORMULA:
        return equal == length and span == length
    if bits < limits[0] or spelled < limits[1]:
        return False
    if equal == length and span == length:
        return length >= limits[2] or weight >= limits[13]
    if length < limits[2]:
        return False
    if kind == ANSWER:
        return equal >= limits[14] * length and equal >= limits[11] * span and weight >= limits[12]
    if (equal >= limits[3] and equal >= limits[4] * length and equal >= limits[5] * span
            and weight >= limits[6] * total and weight >= limits[12]):
        return True
    part = max(min(limits[7], limits[9] * length), limits[3] + 1)
    return length >= limits[10] and equal >= part and equal >= limits[8] * length and equal >= limits[11] * span


@compiled
def seed_hits(words, offsets, tables, hits):
    """Find seeds in documents. Fills hits int64 [3, room] with (document, first word, n-gram), in order of words.

    tables: (known, pairs, filter_2, filter_3, filter_5, keys, grams) of `EvalIndex`. Returns the number of seeds, which
    may exceed `room`.
    """
    known, pairs, filter_2, filter_3, filter_5, table, grams = tables
    room = hits.shape[1]
    count = 0
    two, three, five = np.uint64(2), np.uint64(3), np.uint64(5)
    for document in range(len(offsets) - 1):
        low, high = offsets[document], offsets[document + 1]
        run = 0  # number of consecutive 2-grams that occur in any item
        for last in range(low, high):
            if not _has(known, words[last]):
                run = -1
                continue
            if run < 0:
                run = 0
                continue
            if last == low:
                continue
            pair = _mixed((two * _POLYNOMIAL + words[last - 1]) * _POLYNOMIAL + words[last])
            if not _has(pairs, pair):
                run = 0
                continue
            run += 1
            if _has(filter_2, pair):
                gram = _gram(table, grams, pair)
                if gram >= 0:
                    if count < room:
                        hits[0, count], hits[1, count], hits[2, count] = document, last - 1, gram
                    count += 1
            if run < 2:
                continue
            h = ((three * _POLYNOMIAL + words[last - 2]) * _POLYNOMIAL + words[last - 1]) * _POLYNOMIAL + words[last]
            triple = _mixed(h)
            if _has(filter_3, triple):
                gram = _gram(table, grams, triple)
                if gram >= 0:
                    if count < room:
                        hits[0, count], hits[1, count], hits[2, count] = document, last - 2, gram
                    count += 1
            if run < 4:
                continue
            h = five
            for j in range(last - 4, last + 1):
                h = h * _POLYNOMIAL + words[j]
            h = _mixed(h)
            if _has(filter_5, h):
                gram = _gram(table, grams, h)
                if gram >= 0:
                    if count < room:
                        hits[0, count], hits[1, count], hits[2, count] = document, last - 4, gram
                    count += 1
    return count


@compiled
def find(words, offsets, seeds, postings, readings, limits, hits, scores):
    """Find all matches of documents with items. A document may have several matches, and an item several readings.

    words uint64 [w], offsets int64 [n+1]: the documents. seeds int64 [3, s]: from `seed_hits`. postings:
    (gram_length, post_offsets, post_reading, post_place) and readings: (words, weights, totals, bits, spelled, offsets,
    kind, signatures) of `EvalIndex`. limits float64: see `decontaminate.Rules`. Fills hits int64 [4, room] with
    (document, reading, first and end word in the document), and scores float64 [room]. Returns the number of matches,
    which may exceed `room`.
    """
    gram_length, post_offsets, post_reading, post_place = postings
    item_words, item_weights, item_totals, item_bits, item_spelled, item_offsets, item_kind, signatures = readings
    count_readings = len(item_offsets) - 1
    room = hits.shape[1]
    count = 0
    longest = np.int64(0)
    for entry in range(count_readings):
        longest = max(longest, item_offsets[entry + 1] - item_offsets[entry])
    most = 2 * (_SLACK + longest // 12) + 3
    rows, gains = np.zeros((2, 5, most), np.int32), np.zeros((2, most), np.float64)
    best = np.zeros(5, np.int64)
    # for each reading: the last document; the first word at which to align it; the last seed's word, drift and cover
    last_document, until = np.full(count_readings, -1, np.int64), np.zeros(count_readings, np.int64)
    last, drift, cover = np.zeros((3, count_readings), np.int64)
    for seed in range(seeds.shape[1]):
        document, first, gram = seeds[0, seed], seeds[1, seed], seeds[2, seed]
        low, high = offsets[document], offsets[document + 1]
        length = np.int64(gram_length[gram])
        for post in range(post_offsets[gram], post_offsets[gram + 1]):
            reading, word = np.int64(post_reading[post]), np.int64(post_place[post])
            base = item_offsets[reading]
            size = item_offsets[reading + 1] - base
            origin = first - word
            if last_document[reading] != document:
                last_document[reading], until[reading], cover[reading] = document, low, 0
                last[reading], drift[reading] = first, origin
            if first < until[reading]:
                continue
            slack = _SLACK + size // 12
            least = limits[8] if size >= limits[10] else limits[4]  # least share of the item's words in any match
            needed = max(min(np.int64(limits[3]), size), np.int64(np.ceil(least * size)))
            if size >= LONG:
                near = abs(origin - drift[reading]) <= slack and cover[reading] > 0
                end = first + length
                cover[reading] = cover[reading] + min(end - last[reading], length) if near else length
                last[reading], drift[reading] = end, origin
                if cover[reading] < LONG_COVERED:
                    continue
            begin, stop = max(origin - slack, low), min(origin + size + slack, high)
            if not _enough_words(words, begin, stop, signatures[reading], needed):
                until[reading] = first + 2
                continue
            weight = _align(words, begin, stop, item_words[base : base + size],
                            item_weights[base : base + size], origin, slack, rows, gains, best)
            from_word, to_word = base + reading + best[3], base + reading + best[4]
            share = best[0] / max(best[4] - best[3], 1)
            bits = (item_bits[to_word] - item_bits[from_word]) * share
            spelled = (item_spelled[to_word] - item_spelled[from_word]) * share
            if not _accepted(best, weight, size, item_totals[reading], bits, spelled,
                             item_kind[reading], limits):
                until[reading] = first + (size // 8 if size >= LONG else 2)
                continue
            until[reading] = max(best[2], first + 1)
            cover[reading] = 0
            if count < room:
                hits[0, count], hits[1, count] = document, reading
                hits[2, count], hits[3, count] = best[1] - low, best[2] - low
                scores[count] = weight
            count += 1
    return count
