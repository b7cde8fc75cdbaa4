"""Compute tokens that are known, such as a prompt or the reply of a tool, a chunk at a time.

A chunk bounds the memory: its activations, and with exact attention its scores. Logits are computed for its end alone.
With exact attention the bits are those of a single pass, and of one token after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tidewheel.models.attention_backends import EXACT_ROWS
from tidewheel.models.decoder import Decoder

CHUNK_TOKENS = 1024
"""Tokens of a chunk, all rows together."""


def prefill(model: Decoder, tokens: torch.Tensor, begin: int) -> torch.Tensor:
    """Give a decoder tokens that follow those in its cache (`generate.cached`); return the logits behind them.

    Args:
        model: a whole decoder with a cache.
        tokens: int64 [rows, L]; rows x L is at least `EXACT_ROWS` with exact attention.
        begin: position of the first token.

    Returns:
        fp32 [rows, V].
    """
    rows, length = tokens.shape
    logits = torch.empty(0)
    for first, end in chunks(length, max(1, CHUNK_TOKENS // rows), -(-EXACT_ROWS // rows)):
        part = tokens[:, first:end]
        positions = torch.arange(begin + first, begin + end, device=tokens.device).expand_as(part)
        is_last = end == length

        def ending(hidden: torch.Tensor, make_logits: Callable[[torch.Tensor], torch.Tensor], *_: Any,
                   is_last: bool = is_last) -> torch.Tensor:
            if not is_last:
                return hidden[:, :0]
            kept = min(hidden.shape[1], -(-EXACT_ROWS // rows))  # exact products have so many rows
            return make_logits(hidden[:, -kept:])[:, -1].float()

        logits = model(part, positions, torch.zeros_like(part), objective=ending)
    return logits


def chunks(length: int, size: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds [begin, end) of chunks.

    Args:
        length: tokens of all chunks.
        size: tokens of a chunk but the last one.
        least: fewest tokens of the last one, unless `length` is less: what is left over is then part of it.
    """
    first = 0
    while first < length:
        end = first + size if length - first - size >= least else length
        yield first, end
        first = end
