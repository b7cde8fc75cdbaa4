"""The digest of a batch's sequence ids, as runs record it and audits recompute it."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3


def sequence_digest(ids: Sequence[str]) -> str:
    """32 hex digits over the ids in order; another order gives another digest."""
    return blake3("\n".join(ids).encode()).hexdigest()[:32]
