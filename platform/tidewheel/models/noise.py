"""Noise on embeddings, drawn by counter: NEFTune (https://arxiv.org/abs/2310.05914).

The noise of a token is a pure function of (seed, step, index of the row in the global batch, column, dimension). So
every layout, number of workers and restart adds the same noise, and no random generator has a state to keep.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

GOLDEN = -0x61C8864680B583EB
"""Step between counters, 0x9E3779B97F4A7C15 as a signed number, of SplitMix64
(Steele and others, 2014, https://doi.org/10.1145/2660193.2660195)."""
FIRST, SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Factors of its output function (variant 13 of Stafford's), signed."""


@dataclass(frozen=True)
class EmbeddingNoise:
    """The noise of a micro-batch's tokens, drawn where it is added.

    Args:
        keys: int64 [B, L], one for each token.
        scales: fp32 [B, L], largest size of a token's noise; 0 in padding.
    """

    keys: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, segment_ids: np.ndarray, rows: np.ndarray, step: int, *, alpha: float, dim: int,
           seed: int) -> EmbeddingNoise:
        """Return the noise of some rows, on the CPU.

        Args:
            segment_ids: integers [B, L]; below 0 for padding.
            rows: int64 [B], index of each row in the global batch.
            step: of the run.
            alpha: the noise of a token is uniform within alpha / sqrt(tokens of its document in this row x dim).
            dim: width of the embeddings.
            seed: of the run.
        """
        digest = hashlib.sha256(f"{seed}/neftune/{step}".encode()).digest()
        start = int.from_bytes(digest[:8], "little", signed=True)
        counters = (rows.astype(np.int64)[:, None] << 32) + np.arange(segment_ids.shape[1])
        keys = mixed(start + torch.from_numpy(counters) * GOLDEN)
        documents = (np.arange(len(rows))[:, None] << 32) + segment_ids
        _, inverse, counts = np.unique(documents, return_inverse=True, return_counts=True)
        lengths = counts[inverse].reshape(segment_ids.shape)
        scales = np.where(segment_ids >= 0, alpha / np.sqrt(lengths * float(dim)), 0.0)
        return cls(keys, torch.from_numpy(scales.astype(np.float32)))

    def added(self, x_BLD: torch.Tensor, part: int = 0) -> torch.Tensor:
        """Return embeddings with their noise.

        Args:
            x_BLD: embeddings of all columns, or of one of several equal parts of them.
            part: index of that part.
        """
        length, dim = x_BLD.shape[1:]
        columns = slice(part * length, (part + 1) * length)
        keys, scales = self.keys[:, columns], self.scales[:, columns]
        rows = [(unit_noise(row, dim) * scale[:, None]).to(x_BLD.dtype) for row, scale in zip(keys, scales)]
        return x_BLD + torch.stack(rows)  # row by row: the counters have 8 bytes


def unit_noise(keys: torch.Tensor, dim: int) -> torch.Tensor:
    """Return uniform values in [-1, 1), fp32 [..., D], the same on every device.

    Args:
        keys: int64 [...].
        dim: D.
    """
    counters = torch.arange(1, dim + 1, device=keys.device) * GOLDEN
    bits = mixed(keys[..., None] + counters) >> 40 & 0xFFFFFF
    return bits.float() * 2.0 ** -23 - 1.0


def mixed(counters: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output function of int64 counters, which are overwritten."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        counters ^= counters >> shift & (1 << 64 - shift) - 1  # the shift of a signed number repeats its sign
        counters *= factor
    counters ^= counters >> 31 & (1 << 33) - 1
    return counters
