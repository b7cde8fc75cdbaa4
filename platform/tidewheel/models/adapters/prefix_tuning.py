"""Prefix tuning: learned keys and values before every document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from tidewheel.config import Setting
from tidewheel.models.adapter import Adapter, Place
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tidewheel.models.adapting.peft_forms import Form
    from tidewheel.models.decoder import Decoder
    from tidewheel.models.family import Model


class PrefixTuning(Adapter):
    """Learned keys and values in every layer, which all tokens see (https://arxiv.org/abs/2101.00190).

    RoPE does not turn these keys. Tokens stand behind them: their positions begin at `tokens`.
    """

    VERSION = Version("adapter_prefix_tuning", uses=(Adapter.VERSION,))
    PLACE: ClassVar[Place] = "attention"

    targets: tuple[str, ...] = Field(default=("attention",), min_length=1)
    """See `Adapter.targets`."""
    tokens: int = Field(default=16, ge=1)
    """Number of keys and values in each layer."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of their initial values."""

    def build(self, name: str, module: nn.Module) -> nn.Module:
        from tidewheel.models.adapting.prefix import KeysAndValues

        return KeysAndValues.of(module, self.tokens)

    def prepare(self, model: Decoder) -> None:
        from tidewheel.models.adapting.prefix import move_positions

        move_positions(model, self.tokens)

    def count(self, name: str, inputs: int, outputs: int) -> int:
        return 2 * self.tokens * outputs

    def distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        return 0.0, self.init_std

    def to_peft(self, config: Model, values: Mapping[str, torch.Tensor]) -> Form:
        from tidewheel.models.adapting.peft_forms import prefix_to_peft

        return prefix_to_peft(config, values)

    @classmethod
    def reads_peft(cls, settings: Mapping[str, Setting]) -> bool:
        return bool(settings["peft_type"] == "PREFIX_TUNING")

    @classmethod
    def from_peft(cls, settings: Mapping[str, Setting], tensors: dict[str, torch.Tensor], config: Model,
                  where: str) -> Form:
        from tidewheel.models.adapting.peft_forms import prefix_from_peft

        return prefix_from_peft(settings, tensors, config, where)
