"""Where the documents of a micro-batch begin, computed on the host while the batch is loaded.

Attention kernels need this layout. Computed on a GPU it costs a `nonzero`, for which the host waits in every
micro-batch; on the host it is a comparison of neighbours, done by the thread that reads batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

BLOCK = 128
"""Queries of a block of threads in flash attention's kernels."""


@dataclass(frozen=True)
class Documents:
    """The documents of one micro-batch of B rows of L tokens. Padding at the end of a row counts as a document.

    Args:
        offsets: int32 [F + 1], the start of each document among the B x L tokens, then B x L. F is
            `padded_count(documents)`; entries past the last document repeat B x L, which makes empty documents.
        whole_rows: whether each row holds one document, which begins with the row; padding may follow it.
        longest: at least the tokens of the longest document, at most L.
        on_host: `offsets` in the memory of the host.
    """

    offsets: torch.Tensor
    whole_rows: bool
    longest: int
    on_host: np.ndarray

    @classmethod
    def of(cls, segment_ids: np.ndarray | torch.Tensor) -> Documents:
        """Return the layout of a micro-batch, with its offsets on the CPU.

        Args:
            segment_ids: integers [B, L], a value for each document of a row; padding has -1 and ends the row.
        """
        segments = segment_ids.cpu().numpy() if isinstance(segment_ids, torch.Tensor) else segment_ids
        begins = np.ones(segments.shape, dtype=bool)
        np.not_equal(segments[:, 1:], segments[:, :-1], out=begins[:, 1:])
        starts = np.flatnonzero(begins)
        offsets = np.full(padded_count(len(starts)) + 1, segments.size, dtype=np.int32)
        offsets[:len(starts)] = starts
        whole_rows = not bool((begins[:, 1:] & (segments[:, 1:] >= 0)).any())
        return cls(torch.from_numpy(offsets), whole_rows, longest_of(offsets, segments.shape[1]),
                   offsets)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Documents:
        """Return the layout with its offsets on a device.

        Args:
            device: of the queries.
            non_blocking: see `torch.Tensor.to`.
        """
        return replace(self, offsets=self.offsets.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Documents:
        """Return the layout with its offsets in pinned host memory."""
        return replace(self, offsets=self.offsets.pin_memory())


def longest_of(offsets: np.ndarray, length: int) -> int:
    """Return a bound on the tokens of a document: few values, multiples of the kernels' blocks, at most `length`.

    Args:
        offsets: see `Documents`.
        length: of a row.
    """
    blocks = -(-int(np.diff(offsets).max()) // BLOCK)
    return min(padded_count(blocks) * BLOCK, length)


def padded_count(documents: int) -> int:
    """Return the number of documents that the offsets have room for, less than 5/4 of `documents`.

    It rounds up to three significant bits: 1 to 8, 10, 12, 14, 16, 20, 24, ... So the offsets have few lengths, which
    depend on the micro-batch alone. A bound for every micro-batch would be its number of tokens, and the kernel of
    FlashAttention 2 starts ceil(longest / 128) blocks of threads for each head and each document, empty or not: with 32
    heads and a document of 4,096 tokens, 1,024 blocks for each unused entry.

    Args:
        documents: at least 1.
    """
    step = 1 << max(0, documents.bit_length() - 3)
    return -(-documents // step) * step
