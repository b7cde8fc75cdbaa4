"""Prefix tuning: learned keys and values before every document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from tidewheel.config import Setting
from tidewheel.errors import ConfigError
from tidewheel.models.adapter import Adapter, Place
from tidewheel.models.adapting.names import by_module, parameter_name
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tidewheel.models.adapting.peft_names import Form
    from tidewheel.models.decoder import Decoder
    from tidewheel.models.family import Model


class PrefixTuning(Adapter):
    """Learned keys and values in every layer, which all tokens see (https://arxiv.org/abs/2101.00190).

    RoPE does not turn these keys. Tokens stand behind them: their positions begin at `tokens`.
    """

    VERSION = Version("adapter_prefix_tuning", uses=(Adapter.VERSION,))
    PLACE: ClassVar[Place] = "attention"
    PEFT = "PREFIX_TUNING"

    targets: tuple[str, ...] = Field(default=("attention",), min_length=1)
    """See `Adapter.targets`."""
    tokens: int = Field(default=16, ge=1)
    """Number of keys and values in each layer."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of their initial values."""

    def build(self, name: str, module: nn.Module) -> nn.Module:
        from tidewheel.models.adapting.prefix import KeysAndValues

        return KeysAndValues(self, name, module)

    def prepare(self, model: Decoder) -> None:
        from tidewheel.models.adapting.prefix import move_positions

        move_positions(model, self.tokens)

    def shapes(self, name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {"keys": (self.tokens, outputs), "values": (self.tokens, outputs)}

    def distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        return 0.0, self.init_std

    def to_peft(self, config: Model, values: Mapping[str, torch.Tensor]) -> Form:
        import torch

        modules = by_module(values)
        if len(modules) != config.num_layers:
            raise ConfigError(f"{len(modules)} of {config.num_layers} layers have a prefix; in peft all have one",
                              where="adapter.targets", fix="export only prefixes of all layers")
        columns: list[torch.Tensor] = []  # of layers, each with its keys, then its values
        for layer in range(config.num_layers):
            parts = modules[f"blocks.{layer}.attention"]
            columns += [parts["keys"], parts["values"]]
        return {"peft_type": self.PEFT, "num_virtual_tokens": len(columns[0]), "num_layers": config.num_layers,
                "token_dim": config.kv_heads * config.head_width, "num_attention_heads": config.kv_heads,
                "num_transformer_submodules": 1, "prefix_projection": False, "encoder_hidden_size": config.dim,
                }, {"prompt_embeddings": torch.cat(columns, dim=1).float().contiguous()}

    @classmethod
    def from_peft(cls, settings: Mapping[str, Setting], tensors: dict[str, torch.Tensor], config: Model,
                  where: str) -> Form:
        from tidewheel.models.adapting.peft_names import embeddings

        width = config.kv_heads * config.head_width
        matrix = embeddings(tensors, 2 * config.num_layers * width, where)
        names = [parameter_name(f"blocks.{layer}.attention", key)
                 for layer in range(config.num_layers) for key in ("keys", "values")]
        pieces = [piece.contiguous() for piece in matrix.split(width, dim=1)]
        return {"tokens": len(matrix)}, dict(zip(names, pieces, strict=True))
