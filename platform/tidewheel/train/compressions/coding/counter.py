"""Random numbers as a function of counters: the same on every worker and device, without a generator's state."""

from __future__ import annotations

import hashlib

import torch

from tidewheel.models.noise import GOLDEN, mixed, unit_noise
from tidewheel.train.compression import At

CHUNK = 1 << 20
"""Numbers drawn at a time: the counters of one have 8 bytes."""


def uniform(at: At, what: str, slots: range, count: int, device: torch.device) -> torch.Tensor:
    """Return uniform numbers in [0, 1), fp32 [slots, count], a function of the seed, the step and the arguments.

    Args:
        at: names the parameter, the step and the seed.
        what: what they are for.
        slots: numbers of the rows.
        count: numbers of a row.
        device: of the result.
    """
    digest = hashlib.sha256(f"{at.seed}/compression/{what}/{at.name}/{at.count}".encode()).digest()
    start = int.from_bytes(digest[:8], "little", signed=True)
    rows = torch.arange(slots.start, slots.stop, device=device, dtype=torch.int64)
    keys = mixed(start + rows * GOLDEN)
    firsts = torch.arange(0, count, CHUNK, device=device) * GOLDEN  # wraps around, as a tensor
    parts = [unit_noise(keys + first, min(CHUNK, count - index * CHUNK)) for index, first in enumerate(firsts)]
    return torch.cat(parts, dim=1).add_(1.0).mul_(0.5)
