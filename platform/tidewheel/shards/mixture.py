"""The domain and visit at each position of a mixture: exact, and in constant time for any position.

Positions are assigned in blocks. After m blocks of B positions, each domain has its share of m B positions, rounded by
the method of largest remainders, so it is never off by a whole sequence there. Inside a block, the visits of a domain
are distributed evenly, each at a keyed random position in its own interval. So no prefix of the run is off by more than
2 + D s sequences for a domain with share s among D domains. B is 1,024, doubled until the rarest domain gets a sequence
in every block. Then the rounded shares never fall (largest remainders alone can: the Alabama paradox), and block m
holds the difference of two of them. All of it is integer arithmetic on the block's number, so no state is carried along
from position 0.

The k-th visit of a domain reads the k-th row of the domain's own order, through all of its epochs. A phase of the
curriculum starts a new series of blocks. So does a domain that reaches its limit of visits; from then on the others
divide its share. Both end the current block early.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np

from tidewheel.shards.order import hash64, hash64_array

BLOCK = 1024
MAX_BLOCK = 1 << 16
"""Bounds the work for one position: a domain with less than 1/65,536 of the weights is refused."""


@dataclass(frozen=True)
class Span:
    """Positions [start, end) with constant weights."""

    start: int
    end: int | None
    """None: no end."""
    weights: tuple[int, ...]
    """Weight of each domain; 0: not read here."""
    before: tuple[int, ...]
    """Visits of each domain before `start`."""
    block: int
    """Positions in a block."""

    def counts(self, blocks: int) -> list[int]:
        """Return the visits of each domain in the first `blocks` blocks, by largest remainder; ties go to the first."""
        positions, total = blocks * self.block, sum(self.weights)
        shares = [divmod(positions * weight, total) for weight in self.weights]
        counts = [whole for whole, _ in shares]
        ranked = sorted(range(len(shares)), key=lambda domain: (-shares[domain][1], domain))
        for domain in ranked[:positions - sum(counts)]:
            counts[domain] += 1
        return counts


@dataclass(frozen=True)
class Phase:
    """Configured weights, up to position `end` (None: no end)."""

    end: int | None
    weights: tuple[int, ...]


class Mixture:
    """Domains and visits by position.

    Args:
        phases: in order of time; the last one ends at None.
        limits: maximum number of visits of each domain; None: no limit.
        seed: any integer; only its lowest 64 bits are used.

    Attributes:
        spans: ranges of constant weights, with the limits taken into account.
        end: number of positions, where every domain of the phase has reached its limit; None: no end.

    Raises:
        ValueError: a domain has too small a share, see `MAX_BLOCK`.
    """

    def __init__(self, phases: Sequence[Phase], limits: Sequence[int | None], seed: int) -> None:
        self._seed, self._limits = seed, tuple(limits)
        self.spans: list[Span] = []
        self.end: int | None = None
        self._lay_out(phases)
        self._starts = np.array([span.start for span in self.spans], dtype=np.int64)

    def visits(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (domain, visit), int64 [B] each; a domain's visits count from 0.

        Args:
            positions: int64 [B].

        Raises:
            ValueError: a position is negative or beyond the end.
        """
        positions = np.asarray(positions, dtype=np.int64)
        self._check(positions)
        domains, visits = np.empty_like(positions), np.empty_like(positions)
        owners = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(owners).tolist():
            span = self.spans[number]
            in_span = np.flatnonzero(owners == number)
            blocks, offsets_in_block = np.divmod(positions[in_span] - span.start, span.block)
            for block in np.unique(blocks).tolist():
                in_block = blocks == block
                owner, visit = self._block(span, block)
                domains[in_span[in_block]] = owner[offsets_in_block[in_block]]
                visits[in_span[in_block]] = visit[offsets_in_block[in_block]]
        return domains, visits

    def counts(self, positions: int) -> list[int]:
        """Return the visits of each domain in the first `positions` positions.

        Raises:
            ValueError: there are fewer positions.
        """
        if positions == 0 or not self.spans:
            self._check(np.arange(0 if positions == 0 else 1))
            return [0] * len(self._limits)
        self._check(np.array([positions - 1]))
        span_index = int(np.searchsorted(self._starts, positions - 1, side="right")) - 1
        return self._counts(self.spans[span_index], positions - self.spans[span_index].start)

    def _check(self, positions: np.ndarray) -> None:
        if positions.size and positions.min() < 0:
            raise ValueError(f"positions count from 0, got {positions.min()}")
        if positions.size and self.end is not None and positions.max() >= self.end:
            raise ValueError(f"the mixture ends after {self.end} sequences, got position {positions.max()}")

    def _block(self, span: Span, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (domain, visit), int64 [block] each, of the positions in a block."""
        before, after = span.counts(block), span.counts(block + 1)
        sizes = [last - first for first, last in zip(before, after)]
        domains = np.repeat(np.arange(len(sizes)), sizes)
        ranks = np.concatenate([np.arange(size) for size in sizes])
        key = hash64(hash64(self._seed ^ hash64(span.start)) ^ block)
        noise = hash64_array(np.arange(span.block, dtype=np.uint64) ^ np.uint64(key)) >> np.uint64(32)
        # visit r of c comes at (r + noise) / c of the block, in integers: r < 2^16, noise < 2^32
        times = ((ranks << 32) + noise.astype(np.int64) << 15) // np.array(sizes)[domains]
        order = np.argsort(times, kind="stable")
        first = np.array([base + count for base, count in zip(span.before, before)], dtype=np.int64)
        return domains[order], (first[domains] + ranks)[order]

    def _counts(self, span: Span, length: int) -> list[int]:
        """Return the visits of each domain in the first `length` positions of a span."""
        blocks, rest = divmod(length, span.block)
        counts = [base + count for base, count in zip(span.before, span.counts(blocks))]
        if rest:
            part = np.bincount(self._block(span, blocks)[0][:rest], minlength=len(counts))
            counts = [count + more for count, more in zip(counts, part.tolist())]
        return counts

    def _lay_out(self, phases: Sequence[Phase]) -> None:
        """Build the spans: each phase, divided where a domain reaches its limit."""
        start, before = 0, (0,) * len(self._limits)
        for phase in phases:
            while phase.end is None or start < phase.end:
                weights = tuple(0 if limit is not None and seen >= limit else weight
                                for weight, seen, limit in zip(phase.weights, before, self._limits))
                if not any(weights):
                    self.end = start
                    return
                span = Span(start, None, weights, before, _block_size(weights))
                ends = [phase.end, *(self._exhausted(span, domain) for domain in range(len(weights)))]
                end = min((candidate for candidate in ends if candidate is not None), default=None)
                self.spans.append(Span(start, end, weights, before, span.block))
                if end is None:
                    return
                start, before = end, tuple(self._counts(span, end - start))

    def _exhausted(self, span: Span, domain: int) -> int | None:
        """Return the position after the domain's last allowed visit; None when the span has no such visit."""
        limit = self._limits[domain]
        if limit is None or not span.weights[domain]:
            return None
        left = limit - span.before[domain]
        low, high = 0, left * sum(span.weights) // (span.weights[domain] * span.block) + 2
        while high - low > 1:  # visits(low) < left <= visits(high)
            middle = (low + high) // 2
            low, high = (middle, high) if span.counts(middle)[domain] < left else (low, middle)
        domains, visits = self._block(span, low)
        offset = np.flatnonzero((domains == domain) & (visits == limit - 1))[0]
        return span.start + low * span.block + int(offset) + 1


def integer_weights(weights: Sequence[float | Decimal]) -> tuple[int, ...]:
    """Return integers in exactly the proportions of `weights` as written in decimal: 0.1 is one tenth."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(value.denominator for value in exact))
    whole = [int(value * scale) for value in exact]
    divisor = math.gcd(*whole) or 1
    return tuple(value // divisor for value in whole)


def temperature_weights(sizes: Sequence[int], temperature: float) -> list[Decimal]:
    """Return size ** (1 / temperature) to 12 digits, in decimal arithmetic, which is the same on every machine."""
    with localcontext() as context:
        context.prec = 40
        powers = [Decimal(size) ** (1 / Decimal(str(temperature))) for size in sizes]
        context.prec = 12
        return [+power for power in powers]


def _block_size(weights: Sequence[int]) -> int:
    total, least = sum(weights), min(weight for weight in weights if weight)
    block = BLOCK
    while block * least < total:
        block *= 2
    if block > MAX_BLOCK:
        raise ValueError(f"the smallest weight is {least / total:.3g} of the whole, below 1/{MAX_BLOCK}")
    return block
