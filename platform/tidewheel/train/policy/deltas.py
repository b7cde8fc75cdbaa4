"""What changed between two versions of the policy, as few bytes: their xor, compressed.

A step changes few bits of a weight, and in bf16 most weights not at all, so the xor of two versions is mostly zeros.
Its bytes are put into planes, the first of every four bytes, then the second: those that seldom change stand together.
The xor restores every bit. Sending changed blocks instead would save nothing: nearly every block of 4 KiB changes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

PLANES = 4
"""Bytes of an fp32 element, and of two in bf16."""
LEVEL = 1
"""Of zstd: higher ones took up to five times as long for the same size."""


def encode(before: bytes, now: bytes) -> bytes | None:
    """Return what makes `now` out of `before`; None if that is no smaller than `now`, or they have other lengths."""
    if len(before) != len(now):
        return None
    padded = np.zeros(-(-len(now) // PLANES) * PLANES, dtype=np.uint8)
    np.bitwise_xor(np.frombuffer(before, np.uint8), np.frombuffer(now, np.uint8), out=padded[:len(now)])
    planes = np.ascontiguousarray(padded.reshape(-1, PLANES).T)
    delta: bytes = pa.Codec("zstd", compression_level=LEVEL).compress(planes, asbytes=True)
    return delta if len(delta) < len(now) else None


def decode(before: bytes, delta: bytes) -> bytes:
    """Return the version that `delta` makes out of `before`. The caller checks its hash.

    Raises:
        ValueError: the delta is damaged.
    """
    length = -(-len(before) // PLANES) * PLANES
    try:
        planes = np.frombuffer(pa.Codec("zstd").decompress(delta, length), np.uint8)
    except OSError as error:  # Arrow's error for a stream that is no zstd, or is longer
        raise ValueError(f"the delta is damaged: {error}") from None
    if len(planes) != length:
        raise ValueError(f"the delta has {len(planes)} bytes, not {length}")
    now = planes.reshape(PLANES, -1).T.reshape(-1)[:len(before)]
    return np.bitwise_xor(now, np.frombuffer(before, np.uint8)).tobytes()
