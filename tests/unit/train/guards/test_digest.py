"""Every flipped bit changes a digest, and so does every change of order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tidewheel.train.guards import digest as digests
from tidewheel.train.guards.digest import BLOCK, CHUNK, digest, halves, multilinear, token

MASK = (1 << 64) - 1


def brute_force(words: list[int]) -> int:
    """Return the digest of 32-bit words by its definition, in Python's integers."""
    inner, outer = (factors.tolist() for factors in digests._factors(torch.device("cpu")))
    total = 0
    for place, word in enumerate(words):
        block = place // BLOCK
        total += word * inner[place % BLOCK] * outer[block % BLOCK] * (2 * (block // BLOCK) + 1)
    return total & MASK


@pytest.mark.parametrize("length", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_a_digest_is_its_definition(length: int):
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(length))
    assert int(multilinear([tensor])) & MASK == brute_force(tensor.view(torch.int32).tolist())


def test_tensors_are_one_row_of_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(digests, "CHUNK", 2 * BLOCK)
    tensor = torch.randn(5 * BLOCK + 9)
    whole = int(multilinear([tensor]))
    assert whole & MASK == brute_force(tensor.view(torch.int32).tolist())
    for cuts in ([1], [BLOCK], [2 * BLOCK, 4 * BLOCK], [3, 2 * BLOCK + 1, 5 * BLOCK]):
        assert int(multilinear(tensor.tensor_split(cuts))) == whole
        assert int(digest(tensor.tensor_split(cuts))) == int(digest([tensor]))
    assert CHUNK % BLOCK == 0


@pytest.mark.parametrize("function", [digest, multilinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
def test_every_bit_counts(dtype: torch.dtype, function: Callable[[list[torch.Tensor]], torch.Tensor]):
    tensor = (torch.randn(40) * 3).to(dtype)
    seen = {int(function([tensor]))}
    for byte in range(tensor.nbytes):
        for bit in range(1 if dtype is torch.bool else 8):
            changed = tensor.clone()
            changed.view(torch.uint8)[byte] ^= 1 << bit
            seen.add(int(function([changed])))
    assert len(seen) == 1 + tensor.nbytes * (1 if dtype is torch.bool else 8)


def test_the_order_counts():
    values = torch.randn(6)
    for function in (digest, multilinear):
        assert int(function([values])) != int(function([values.flip(0)]))


def test_sums_of_tokens_are_exact_and_differ():
    rng = random.Random(1)
    values = {micro: rng.getrandbits(64) - (1 << 63) for micro in range(5000)}
    first, second = dict(list(values.items())[:1234]), dict(list(values.items())[1234:])
    sums = [sum(pair) for pair in zip(halves(first, 3), halves(second, 3))]
    assert tuple(sums) == halves(values, 3), "whoever computed what"
    assert halves({**values, 7: values[7] ^ 1}, 3) != tuple(sums)
    assert halves(values, 2) != tuple(sums)
    assert token(1, "a") != token(2, "a")
