"""Any part of the normal values that torch's CPU generator draws, without drawing those before it.

The generator is MT19937 (Matsumoto and Nishimura, 1998, https://doi.org/10.1145/272991.272995), whose words x obey a
linear recurrence over GF(2) with a characteristic polynomial phi of degree 19937. So for every i

    x[i + n] = sum of g[k] x[i + k], where g = t^n mod phi

(Haramoto and others, 2008, https://doi.org/10.1287/ijoc.1070.0251). It takes a tenth of a second to compute g for a
large n, and milliseconds to apply it. Polynomials over GF(2) are Python integers: bit k is the coefficient of t^k.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

WORDS, MIDDLE, LOW_BITS, TWIST = 624, 397, 31, 0x9908B0DF
"""Parameters n, m, r and a of MT19937."""
DEGREE = 32 * WORDS - LOW_BITS
BLOCK = 16
"""torch makes 16 normal values from 16 draws, by the Box-Muller transform."""
DRAWN = 1 << 20
"""Up to this position it is faster to draw all values than to jump."""


def normal_values(seed: int, count: int, start: int, stop: int, std: float = 1.0) -> torch.Tensor:
    """Return `torch.empty(count).normal_(0, std)[start:stop]` of a new CPU generator, fp32.

    Args:
        seed: of the generator.
        count: number of values in the whole tensor.
        start: first value to return.
        stop: end of the values to return.
        std: standard deviation.
    """
    if stop <= start:
        return torch.empty(0)
    first = start // BLOCK * BLOCK
    end = min(count, -(-stop // BLOCK) * BLOCK)
    if count % BLOCK and end > count - BLOCK:  # torch draws the last 16 values again if there is a remainder
        end = count
        first = min(first, max(0, count - BLOCK) // BLOCK * BLOCK)
    if first <= DRAWN or not can_jump():
        first = 0
    if first == 0 and end < count and end < BLOCK:
        end = count
    generator = torch.Generator().manual_seed(seed)
    if first:
        generator.set_state(_state_at(generator, first))
    return torch.empty(end - first).normal_(0.0, std, generator=generator)[start - first:stop - first]


@functools.cache
def can_jump() -> bool:
    """Return whether this release of torch keeps the generator's state and draws values as this module assumes."""
    whole = torch.empty(8 * BLOCK).normal_(generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    try:
        generator.set_state(_state_at(generator, 5 * BLOCK))
    except (RuntimeError, ValueError):
        return False
    return torch.equal(torch.empty(3 * BLOCK).normal_(generator=generator), whole[5 * BLOCK:])


def _state_at(generator: torch.Generator, draws: int) -> torch.Tensor:
    """Return the state of a newly seeded generator after a number of draws.

    Raises:
        ValueError: the state has another layout.
    """
    state = generator.get_state().clone()
    values = state.numpy()
    if values.nbytes < 24 + 8 * WORDS:
        raise ValueError(f"a state of {values.nbytes} bytes is not MT19937's")
    # seed (8 bytes), words left (4), seeded (4), next word (8), 624 words of 8 bytes; one word left: all are renewed
    words = values[24:24 + 8 * WORDS].view(np.uint64)
    sequence = _words(words.astype(np.uint32), DEGREE + WORDS)
    terms = _terms(_power(draws))
    jumped = np.zeros(WORDS, dtype=np.uint32)
    windows = np.lib.stride_tricks.sliding_window_view(sequence, WORDS)
    for some in np.array_split(terms, -(-len(terms) // 1024)):
        jumped ^= np.bitwise_xor.reduce(windows[some], axis=0)
    words[:] = jumped
    return state


def _words(first: np.ndarray, count: int) -> np.ndarray:
    """Return `count` words of the recurrence, uint32, from its first 624."""
    words = np.empty(count, dtype=np.uint32)
    words[:WORDS] = first
    step = WORDS - MIDDLE  # so many words do not depend on each other
    for begin in range(WORDS, count, step):
        end = min(count, begin + step)
        old = slice(begin - WORDS, end - WORDS)
        following = slice(begin - WORDS + 1, end - WORDS + 1)
        mixed = (words[old] & np.uint32(1 << LOW_BITS)) | (words[following] & np.uint32((1 << LOW_BITS) - 1))
        twisted = np.where(mixed & np.uint32(1), np.uint32(TWIST), np.uint32(0))
        words[begin:end] = words[begin - WORDS + MIDDLE:end - WORDS + MIDDLE] ^ (mixed >> np.uint32(1)) ^ twisted
    return words


@functools.lru_cache(maxsize=256)
def _power(exponent: int) -> int:
    """Return t^exponent mod phi."""
    shift = max(0, exponent.bit_length() - DEGREE.bit_length() + 1)
    power = 1 << (exponent >> shift)
    for bit in reversed(range(shift)):
        power = _reduced(_square(power) << (exponent >> bit & 1))
    return power


def _square(polynomial: int) -> int:
    return int(f"{polynomial:b}", 4)  # the square of a sum is the sum of squares: a zero after each bit


def _reduced(polynomial: int) -> int:
    """Return a polynomial modulo phi."""
    while high := polynomial >> DEGREE:
        polynomial ^= high << DEGREE
        for term in _lower_terms():
            polynomial ^= high << term
    return polynomial


@functools.cache
def _lower_terms() -> list[int]:
    return _terms(characteristic_polynomial())[:-1]


def _terms(polynomial: int) -> list[int]:
    """Return the exponents of a polynomial, ascending."""
    return [index for index, bit in enumerate(reversed(f"{polynomial:b}")) if bit == "1"]


@functools.cache
def characteristic_polynomial() -> int:
    """Return phi in the closed form of Matsumoto and Nishimura's appendix A, for w - r = 1."""
    upper = (1 << WORDS) | (1 << MIDDLE)
    lower = (1 << WORDS - 1) | (1 << MIDDLE - 1)
    powers = [1]
    for _ in range(LOW_BITS):
        powers.append(_product(powers[-1], lower))
    phi = _product(upper, powers[LOW_BITS])
    for index in range(LOW_BITS):
        if TWIST >> index & 1:
            phi ^= _product(upper, powers[LOW_BITS - 1 - index])
    return phi ^ (TWIST >> LOW_BITS & 1)


def _product(left: int, right: int) -> int:
    product = 0
    for term in _terms(right):
        product ^= left << term
    return product
