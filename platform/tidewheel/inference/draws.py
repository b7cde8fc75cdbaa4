"""Random numbers that are functions of a key, so that a sampled token depends on nothing that was drawn before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
_ROUNDS = 10
PLACES = 32
"""Tokens of an answer whose numbers are computed together."""


def philox(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Return Philox4x32-10 of each counter (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Args:
        counters: uint32 [n, 4].
        key: two numbers below 2^32.

    Returns:
        uint32 [n, 4].
    """
    words = [counters[:, index].astype(np.uint64) for index in range(4)]
    first, second = key
    for _ in range(_ROUNDS):
        products = (words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1])
        words = [(products[1] >> _HIGH) ^ words[1] ^ np.uint64(first), products[1] & _LOW,
                 (products[0] >> _HIGH) ^ words[3] ^ np.uint64(second), products[0] & _LOW]
        first = (first + _WEYL[0]) & 0xFFFFFFFF
        second = (second + _WEYL[1]) & 0xFFFFFFFF
    return np.stack(words, axis=1).astype(np.uint32)


def uniforms(key: int, stream: int | Sequence[int], samples: Sequence[int],
             position: int | Sequence[int]) -> np.ndarray:
    """Return a number in (0, 1) for each sample, fp64 [n], with 53 random bits.

    Args:
        key: below 2^64, as the hash of a run.
        stream: below 2^64, as the hash of a prompt and of what else tells its groups apart; one for all samples, or one
            for each.
        samples: index of each sample in its group, below 2^32.
        position: of the token, below 2^32; one for all samples, or one for each.
    """
    counters = np.empty((len(samples), 4), dtype=np.uint32)
    counters[:, 0] = samples
    counters[:, 1] = position
    streams = np.array(stream, dtype=np.uint64)
    counters[:, 2] = streams & _LOW
    counters[:, 3] = streams >> _HIGH
    words = philox(counters, (key & 0xFFFFFFFF, key >> 32)).astype(np.uint64)
    bits = (words[:, 0] << np.uint64(21)) ^ (words[:, 1] >> np.uint64(11))
    return (bits.astype(np.float64) + 0.5) / 2.0 ** 53


class Numbers:
    """The numbers of the tokens of groups, computed for many places at once where all answers are at one place.

    Args:
        key: see `uniforms`.
        streams: of each answer, see `uniforms`.
        samples: index of each answer in its group.
        together: whether all answers are always at the same place.
    """

    def __init__(self, key: int, streams: Sequence[int], samples: Sequence[int], *, together: bool) -> None:
        self._key, self._streams, self._samples, self._together = key, list(streams), list(samples), together
        self._first = 0
        self._block = np.empty((0, len(self._samples)))  # of the places from `first` on

    def of(self, answers: Sequence[int], places: Sequence[int]) -> np.ndarray:
        """Return a number for each of some answers, fp64 [n].

        Args:
            answers: indices in the group.
            places: of the next token of each.
        """
        if not self._together:
            return uniforms(self._key, [self._streams[answer] for answer in answers],
                            [self._samples[answer] for answer in answers], places)
        [place] = set(places)
        if not self._first <= place < self._first + len(self._block):
            self._first = place
            block = [each for each in range(place, place + PLACES) for _ in self._samples]
            self._block = uniforms(self._key, self._streams * PLACES, self._samples * PLACES, block).reshape(PLACES, -1)
        numbers: np.ndarray = self._block[place - self._first]
        return numbers if len(answers) == len(self._samples) else numbers[list(answers)]

    def part(self, begin: int, count: int) -> Numbers:
        """Return the numbers of `count` answers from index `begin` on."""
        return Numbers(self._key, self._streams[begin:begin + count], self._samples[begin:begin + count],
                       together=self._together)
