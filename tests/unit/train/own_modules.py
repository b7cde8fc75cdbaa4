"""Modules of a user's own, with forward passes as Hugging Face's."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

import tidewheel as tw


class Layer(nn.Module):
    """One layer of attention, whose mask the model gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, mask):
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))


class Network(nn.Module):
    """Two layers between a tied embedding and output; documents begin where positions do."""

    def __init__(self, vocabulary: int, width: int, *, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.1), persistent=False)
        self.causal = causal

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None):
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device)[None]
        if self.causal:
            mask = mask.tril()
        if position_ids is not None:
            document = (position_ids == 0).cumsum(dim=1)
            mask = mask & (document[:, :, None] == document[:, None, :])
        x = self.embedding(input_ids) * self.scale
        for layer in self.layers:
            x = layer(x, mask)
        return SimpleNamespace(logits=self.head(x))


class WithoutPositions(Network):
    """The same without positions, so that documents are not kept apart."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        return super().forward(input_ids).logits


class Tiny(tw.OwnModule):
    """The network with logits in an object."""

    width: int = 16

    def module(self, vocabulary_size):
        return Network(vocabulary_size, self.width)


class Leaky(Tiny):
    """A network whose tokens see earlier documents, and which returns logits."""

    def module(self, vocabulary_size):
        return WithoutPositions(vocabulary_size, self.width)


class Ahead(Tiny):
    """A network whose tokens see those after them."""

    def module(self, vocabulary_size):
        return Network(vocabulary_size, self.width, causal=False)


class Dropping(Tiny):
    """A network with dropout."""

    def module(self, vocabulary_size):
        return Network(vocabulary_size, self.width, dropout=0.1)


class Narrow(Tiny):
    """A network with too few logits."""

    def module(self, vocabulary_size):
        return Network(vocabulary_size - 1, self.width)


class NeoX(tw.OwnModule):
    """GPT-NeoX of transformers, which Tidewheel does not have."""

    width: int = 32

    def module(self, vocabulary_size):
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        return GPTNeoXForCausalLM(GPTNeoXConfig(
            vocab_size=vocabulary_size, hidden_size=self.width, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=64, hidden_dropout=0.0, attention_dropout=0.0))
