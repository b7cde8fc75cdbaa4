"""IA3: a factor for each activation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.config import Setting
from tidewheel.models.adapter import Adapter
from tidewheel.models.adapting.names import matches
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tidewheel.models.adapting.peft_forms import Form
    from tidewheel.models.family import Model


class Ia3(Adapter):
    """Learned factors of keys, values and the inner activations of feed-forwards (https://arxiv.org/abs/2205.05638)."""

    VERSION = Version("adapter_ia3", uses=(Adapter.VERSION,))

    targets: tuple[str, ...] = Field(default=("wk", "wv", "w2"), min_length=1)
    """See `Adapter.targets`."""
    inputs: tuple[str, ...] = ("w2",)
    """Those of the targets whose inputs are multiplied; of the others the outputs are."""

    def build(self, name: str, module: nn.Module) -> nn.Module:
        from tidewheel.models.adapting.factors import Factors

        return Factors.of(module, of_inputs=any(matches(pattern, name) for pattern in self.inputs))

    def count(self, name: str, inputs: int, outputs: int) -> int:
        return inputs if any(matches(pattern, name) for pattern in self.inputs) else outputs

    def distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        return 1.0, 0.0

    def to_peft(self, config: Model, values: Mapping[str, torch.Tensor]) -> Form:
        from tidewheel.models.adapting.peft_forms import factors_to_peft

        return factors_to_peft(config, values, self.inputs)

    @classmethod
    def reads_peft(cls, settings: Mapping[str, Setting]) -> bool:
        return bool(settings["peft_type"] == "IA3")

    @classmethod
    def from_peft(cls, settings: Mapping[str, Setting], tensors: dict[str, torch.Tensor], config: Model,
                  where: str) -> Form:
        from tidewheel.models.adapting.peft_forms import factors_from_peft

        return factors_from_peft(settings, tensors, config, where)
