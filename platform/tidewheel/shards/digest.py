"""A short digest of the sequences that a step read."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3


def sequence_digest(ids: Iterable[str]) -> str:
    """Return 32 hex digits over sequence ids ("shardname:row") in their order; ids contain no line break."""
    return blake3("".join(f"{name}\n" for name in ids).encode()).hexdigest(length=16)
