"""Learned keys and values before every document: prefix tuning."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import torch
from torch import nn

from tidewheel.errors import ConfigError
from tidewheel.models.adapting.shards import own
from tidewheel.models.attention import DocumentMask
from tidewheel.models.decoder import Decoder


class KeysAndValues(nn.Module):
    """Keys and values of a layer, which every token of every document sees, [T, K, E].

    Args:
        tokens: T.
        heads: K, key heads.
        width: E, of a head.
        device: of the parameters.
    """

    CUTS: ClassVar[dict[int, dict[str, int]]] = {0: {"keys": 1, "values": 1}}
    """Tensor parallelism cuts heads, as it cuts the rows of the matrix of keys."""

    def __init__(self, tokens: int, heads: int, width: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(tokens, heads, width, device=device))
        self.values = nn.Parameter(torch.empty(tokens, heads, width, device=device))

    @classmethod
    def of(cls, module: nn.Module, tokens: int) -> Self:
        """Return the prefix of an attention layer; see the class."""
        matrix, width = module.wk, int(module.head_dim)  # type: ignore[arg-type]
        assert isinstance(matrix, nn.Linear)
        return cls(tokens, matrix.out_features // width, width, device=next(module.parameters()).device)

    def forward(self, layer: nn.Module, base: Any, x: torch.Tensor, rope: Any, mask: DocumentMask) -> torch.Tensor:
        """Return the attention's output with the prefix, given its mask of the tokens alone.

        Args:
            layer: the attention.
            base: its own forward pass.
            x: its input [B, L, D].
            rope: its rotary table.
            mask: a dense mask.

        Raises:
            ConfigError: the mask is of another kernel.
        """
        if mask.dense is None:
            raise ConfigError(f"prefixes need the attention kernel masked, not {mask.kernel}", where="model.attention",
                              fix="set model.attention: masked, or choose another adapter")
        fetch = mask.keys

        def keys(module: nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if fetch is not None:
                k, v = fetch(module, k, v)
            return self._before(self.keys, k), self._before(self.values, v)

        always = mask.dense.new_ones(*mask.dense.shape[:3], len(self.keys))
        return base(x, rope, dataclasses.replace(mask, dense=torch.cat((always, mask.dense), dim=3), keys=keys))

    @staticmethod
    def _before(prefix_TKE: torch.Tensor, of_tokens_BKLE: torch.Tensor) -> torch.Tensor:
        prefix = own(prefix_TKE).transpose(0, 1).to(of_tokens_BKLE.dtype)
        return torch.cat((prefix.expand(len(of_tokens_BKLE), -1, -1, -1), of_tokens_BKLE), dim=2)


def move_positions(model: Decoder, tokens: int) -> None:
    """Let the positions of a decoder's tokens begin at `tokens`.

    Raises:
        ConfigError: positions are learned.
    """
    if model.config.learned_positions:
        raise ConfigError("prefixes move the positions, which this model family has learned", where="adapter.kind",
                          fix="choose another adapter")
    table = model.rope
    model.rope = lambda positions, layer=0: table(positions + tokens, layer)  # type: ignore[method-assign, misc]
