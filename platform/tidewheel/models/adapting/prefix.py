"""Learned keys and values before every document: prefix tuning."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn

from tidewheel.errors import ConfigError
from tidewheel.models.adapting.added import Added, Cuts
from tidewheel.models.adapting.shards import own
from tidewheel.models.attention import DocumentMask
from tidewheel.models.decoder import Decoder


class KeysAndValues(Added):
    """Keys and values of a layer, which every token of every document sees, [T, K E] of K heads of width E."""

    keys: nn.Parameter
    values: nn.Parameter
    CUTS: ClassVar[Cuts] = {0: {"keys": 1, "values": 1}}  # between heads, as the rows of the matrix of keys

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
    def _before(prefix: torch.Tensor, of_tokens_BKLE: torch.Tensor) -> torch.Tensor:
        prefix_TKE = own(prefix).unflatten(1, (-1, of_tokens_BKLE.shape[3]))
        prefix = prefix_TKE.transpose(0, 1).to(of_tokens_BKLE.dtype)
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
