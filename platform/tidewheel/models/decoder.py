"""The decoder, a stack of a model family's blocks between an embedding and an output.

Suffixes of names give shapes: B rows, L positions, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tidewheel.models.attention import DocumentMask, choose_kernel, document_mask
from tidewheel.models.blocks.embedding import Embedding
from tidewheel.models.config import LossConfig, Rope
from tidewheel.models.documents import Documents
from tidewheel.models.family import Model
from tidewheel.models.loss import IGNORED, TokenLoss, product_dtype, soft_capped
from tidewheel.models.noise import EmbeddingNoise
from tidewheel.models.rope import RopeTable, rope_table
from tidewheel.parts import calling

HeadObjective = Callable[..., torch.Tensor]
"""From normalised hidden states [B, L, D] and the output layer to the loss and its metrics. Of a decoder with a value
head, its third argument is the values [B, L]."""
VALUE_HEAD = "value_head.weight"
"""Name of the matrix of a value head."""


class Decoder(nn.Module):
    """A decoder from tokens to logits, or to a loss if targets are given.

    Parameters are uninitialised, because the module may be built on the meta device; `initial_values` has their
    initial values. A pipeline stage is a decoder with fewer blocks. Without `embedding` it takes the residual stream
    in the place of tokens; without `norm` it returns the residual stream.

    Args:
        config: the model family's settings.
        vocabulary_size: number of rows of the embedding and the output.
        loss: settings of the cross-entropy.

    `routings` has what the mixture-of-experts layers of the last forward pass returned besides x, by layer.
    """

    def __init__(self, config: Model, vocabulary_size: int, loss: LossConfig | None = None) -> None:
        super().__init__()
        self.config, self.vocabulary_size = config, vocabulary_size
        self.embedding: Embedding | None = Embedding(
            vocabulary_size, config.dim, positions=config.learned_positions, scale=config.embedding_scale)
        with calling(config):
            self.blocks = nn.ModuleList(config.block(layer) for layer in range(config.num_layers))
        self.norm: nn.Module | None = config.norm()
        self.output = None if config.tie_embeddings else nn.Linear(config.dim, vocabulary_size, bias=False)
        self.value_head: nn.Linear | None = None
        self.token_loss = TokenLoss(loss or LossConfig(), config.logit_soft_cap)
        self.routings: dict[int, Any] = {}

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor,
                targets: torch.Tensor | None = None, objective: HeadObjective | None = None,
                documents: Documents | None = None, noise: EmbeddingNoise | None = None) -> torch.Tensor:
        """Return logits, or the loss.

        Args:
            tokens: int64 [B, L].
            positions: integers [B, L], from 0 in each document.
            segment_ids: integers [B, L], see `document_mask`.
            targets: int64 [B, L] from `next_tokens`.
            objective: computes the loss from normalised hidden states and the output layer.
            documents: where documents begin, if it is known on the host; see `document_mask`.
            noise: is added to the embeddings of the tokens.

        Returns:
            Without targets, logits [B, L, V]. With an objective, its result. Otherwise the sum over positions of the
            cross-entropy in nats, an fp32 scalar.
        """
        x_BLD = tokens if self.embedding is None else self.embedding(tokens, positions, noise)
        ropes: dict[Rope | None, RopeTable | None] = {}
        masks: dict[int | None, DocumentMask] = {}
        for layer, _ in self.layers():  # all before the first block runs: a cache counts the keys of the blocks
            rope, window = self.config.rope(layer), self.config.window(layer)
            if rope not in ropes:
                ropes[rope] = self.rope(positions, layer)
            if window not in masks:
                masks[window] = self.mask(segment_ids, x_BLD, documents, window)
        self.routings = {}
        for layer, block in self.layers():
            x_BLD = block(x_BLD, ropes[self.config.rope(layer)], masks[self.config.window(layer)])
            if isinstance(x_BLD, tuple):
                x_BLD, self.routings[layer] = x_BLD
        return x_BLD if self.norm is None else self.head(x_BLD, targets, objective)

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield (index in the whole model, block) of the blocks that this decoder holds."""
        for name, block in self.blocks.named_children():
            yield int(name), block

    def rope(self, positions: torch.Tensor, layer: int = 0) -> RopeTable | None:
        """Return the RoPE angles of `positions` [B, L] for a layer; None: it has no RoPE."""
        rope = self.config.rope(layer)
        return None if rope is None else rope_table(positions, rope)

    def mask(self, segment_ids: torch.Tensor, x: torch.Tensor, documents: Documents | None = None,
             window: int | None = None) -> DocumentMask:
        """Return the attention mask for the blocks of one window.

        Context parallelism and a cache of keys replace this method by one whose mask has `keys`.

        Args:
            segment_ids: integers [B, L].
            x: input of the first block [B, L, D].
            documents: see `forward`.
            window: of a sliding window; see `document_mask`.
        """
        config = self.config
        kernel = choose_kernel(config.attention, x.device, product_dtype(x), head_width=config.head_width,
                               documents=documents, window=window, flash=config.flash_attention,
                               plain=config.plain_attention, length=segment_ids.shape[1])
        return document_mask(segment_ids, kernel, documents=documents, window=window)

    def head(self, x_BLD: torch.Tensor, targets: torch.Tensor | None = None,
             objective: HeadObjective | None = None) -> torch.Tensor:
        """Return logits or the loss of the residual stream after the last block.

        Args:
            x_BLD: the residual stream.
            targets: see `forward`.
            objective: see `forward`.
        """
        assert self.norm is not None
        x_BLD = self.norm(x_BLD)
        if objective is not None:
            values = () if self.value_head is None else (self.values(x_BLD),)
            return objective(x_BLD, self.logits, *values)
        return self.logits(x_BLD) if targets is None else self.token_loss(x_BLD, self.logits, self.weight, targets)

    def logits(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, L, V] of normalised hidden states."""
        logits = F.linear(x_BLD, self.weight) if self.output is None else self.output(x_BLD)
        return soft_capped(logits, self.config.logit_soft_cap)

    def add_value_head(self) -> None:
        """Add a head that estimates the return from each position on, uninitialised like all parameters."""
        self.value_head = nn.Linear(self.config.dim, 1, bias=False, dtype=self.weight.dtype, device=self.weight.device)

    def values(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Return the values of normalised hidden states, fp32 [B, L], in fp32 products; for a decoder with the head."""
        assert self.value_head is not None
        with torch.autocast(x_BLD.device.type, enabled=False):
            return F.linear(x_BLD.float(), self.value_head.weight.float())[..., 0]

    @property
    def weight(self) -> torch.Tensor:
        """Return the output matrix [V, D]."""
        matrix = self.embedding if self.output is None else self.output
        assert matrix is not None
        return matrix.weight


def next_tokens(tokens: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Return the targets, int64 [B, L]: the next token of the same document.

    The last token of a document and padding have `IGNORED`.

    Args:
        tokens: int64 [B, L].
        segment_ids: integers [B, L]; below 0 for padding.
    """
    targets = torch.full_like(tokens, IGNORED)
    inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
    targets[:, :-1] = torch.where(inside, tokens[:, 1:], IGNORED)
    return targets
