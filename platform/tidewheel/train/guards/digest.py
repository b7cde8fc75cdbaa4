"""Digests of tensors that their device computes, so that 8 bytes travel instead of a gradient.

On a CPU it is XXH3 of the tensors' bytes. On other devices it is the sum of all words of the bytes, each multiplied by
an odd random number that belongs to its place, modulo 2^64 (multilinear hashing, https://arxiv.org/abs/1202.4961).
Integer sums have the same bits in every order, so a GPU may add as it likes. A change of a single word always changes
the sum, because an odd factor has an inverse; other changes escape with a probability of about 2^-32. Neither
withstands an attacker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
import xxhash

from tidewheel.train.reproducible.gradient_order import Tap

BLOCK = 1 << 14
"""Words that share one table of factors; each block has a factor of its own besides."""
CHUNK = 1 << 20
"""Words that are converted to 64 bits at a time, 8 MiB."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Type of a word by the bytes of an element. A word of 64 bits counts as two, or its upper bits might cancel."""
HALF = 1 << 32


def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the digest of the bytes of tensors in this order, an int64 scalar on their device.

    Args:
        tensors: of any shapes and dtypes, on one device; at least one.
    """
    held = [tensor.detach().reshape(-1) for tensor in tensors]
    if held[0].device.type != "cpu":
        return multilinear(held)
    hashed = xxhash.xxh3_64()
    for flat in held:
        hashed.update(flat.view(torch.uint8).numpy().data)
    return torch.tensor(hashed.intdigest() - (1 << 63), dtype=torch.int64)


def multilinear(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the words of tensors times their factors, an int64 scalar on their device.

    Args:
        tensors: of any shapes and dtypes, on one device; at least one.
    """
    total: torch.Tensor | None = None
    for number, words in enumerate(_chunks(tensors)):
        inner, outer = _factors(words.device)
        whole = len(words) // BLOCK * BLOCK
        blocks = torch.arange(number * (CHUNK // BLOCK), number * (CHUNK // BLOCK) + whole // BLOCK + 1,
                              device=words.device)
        sums = torch.cat(((words[:whole].view(-1, BLOCK) * inner).sum(dim=1),
                          (words[whole:] * inner[:len(words) - whole]).sum()[None]))
        part = (sums * outer[blocks % BLOCK] * (2 * (blocks // BLOCK) + 1)).sum()
        total = part if total is None else total + part
    assert total is not None, "there is at least one tensor"
    return total


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the words of all tensors as int64, `CHUNK` at a time; the last chunk may be shorter."""
    held: list[torch.Tensor] = []
    room = CHUNK
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        words = flat.view(WORDS[flat.element_size()])
        while len(words) >= room:
            yield torch.cat([*held, words[:room].long()])
            words, held, room = words[room:], [], CHUNK
        held.append(words.long())
        room -= len(words)
    if held:
        yield torch.cat(held)


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return odd factors of words and of blocks, int64 [BLOCK] each, the same in every process."""
    generator = torch.Generator().manual_seed(0x5D0C)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (2, BLOCK), generator=generator) | 1
    return drawn[0].to(device), drawn[1].to(device)


class GradientDigests(Tap):
    """Digests of a rank's gradients, one for each micro-batch."""

    def __init__(self) -> None:
        self._parts: dict[int, list[torch.Tensor]] = {}

    def add(self, micro: int, flat: torch.Tensor) -> None:
        self._parts.setdefault(micro, []).append(digest([flat]))

    def read(self) -> dict[int, int]:
        """Wait for the device, and return a digest of all parts by micro-batch."""
        return {micro: combined(torch.stack(parts).tolist()) for micro, parts in sorted(self._parts.items())}


def of_batch(batch: Any) -> int:
    """Return the digest of all tensors and numbers of a micro-batch, a dataclass; waits for the device."""
    tensors: list[torch.Tensor] = []
    others: list[str] = []
    _collect(batch, tensors, others)
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    return combined([int(digest(tensors)), token(0, repr((others, shapes)))])


def _collect(value: Any, tensors: list[torch.Tensor], others: list[str]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _collect(getattr(value, field.name), tensors, others)
    else:
        others.append(repr(value))


def combined(values: Sequence[int]) -> int:
    """Return one signed 64-bit number for several in order."""
    return token(len(values), " ".join(map(str, values)))


def token(key: int, text: str) -> int:
    """Return a signed 64-bit number for a text in a place."""
    return int.from_bytes(hashlib.blake2b(f"{key} {text}".encode(), digest_size=8).digest(), "little", signed=True)


def halves(tokens: Mapping[int, int], place: int) -> tuple[float, float]:
    """Return the sums of the lower and the upper 32 bits of tokens of all values.

    Sums over ranks of these stay exact in fp64. They are equal for two sets of values unless one differs, except with a
    probability of 2^-64.

    Args:
        tokens: value by micro-batch.
        place: distinguishes ranks that have different parts of a micro-batch.
    """
    mixed = [token(place, f"{key} {value}") % (1 << 64) for key, value in tokens.items()]
    return float(sum(value % HALF for value in mixed)), float(sum(value // HALF for value in mixed))
