"""Learned embeddings before every document: prompt tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from tidewheel.errors import ConfigError
from tidewheel.models.adapting.added import Added
from tidewheel.models.attention import DocumentMask
from tidewheel.models.decoder import Decoder
from tidewheel.models.documents import Documents


class Prompt(Added):
    """Embeddings [T, D] that are put before the first token of each row."""

    embeddings: nn.Parameter

    def forward(self, layer: nn.Module, base: Any, *inputs: Any) -> torch.Tensor:
        """Return the prompt and the embeddings of the tokens, [B, T + L, D]."""
        x_BLD = base(*inputs)
        prompt = self.embeddings.to(x_BLD.dtype).expand(len(x_BLD), -1, -1)
        return torch.cat((prompt, x_BLD), dim=1)


def make_room(model: Decoder, tokens: int) -> None:
    """Let a decoder's positions, masks and head count the prompt's positions.

    Args:
        model: whole decoder, to whose embedding a prompt is attached.
        tokens: of the prompt.

    Raises:
        ConfigError: positions are learned.
    """
    if model.config.learned_positions:
        raise ConfigError("prompts move the positions, which this model family has learned", where="adapter.kind",
                          fix="choose another adapter")
    table, mask_of_tokens, head = model.rope, model.mask, model.head

    def rope(positions: torch.Tensor, layer: int = 0) -> Any:
        of_prompt = torch.arange(tokens, device=positions.device, dtype=positions.dtype)
        return table(torch.cat((of_prompt.expand(len(positions), -1), positions + tokens), dim=1), layer)

    def mask(segment_ids: torch.Tensor, x: torch.Tensor, documents: Documents | None = None,
             window: int | None = None) -> DocumentMask:
        inner = mask_of_tokens(segment_ids, x, documents, window)
        if inner.dense is None:
            raise ConfigError(f"prompts need the attention kernel masked, not {inner.kernel}", where="model.attention",
                              fix="set model.attention: masked, or choose another adapter")
        rows, length = segment_ids.shape
        dense = inner.dense.new_zeros(rows, 1, tokens + length, tokens + length)
        dense[:, :, :, :tokens] = True
        dense[:, :, :tokens, :tokens] = dense.new_ones(tokens, tokens).tril()
        dense[:, :, tokens:, tokens:] = inner.dense
        return dataclasses.replace(inner, dense=dense)

    def head_of_tokens(x_BLD: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return head(x_BLD[:, tokens:], *others, **named)

    model.rope = rope  # type: ignore[method-assign]
    model.mask = mask  # type: ignore[method-assign, assignment]
    model.head = head_of_tokens  # type: ignore[method-assign]
