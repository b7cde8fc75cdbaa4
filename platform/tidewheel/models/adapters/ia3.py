"""IA3: a factor for each activation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.config import Setting
from tidewheel.models.adapter import Adapter
from tidewheel.models.adapting.names import by_module, matches, parameter_name
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tidewheel.models.adapting.peft_names import Form
    from tidewheel.models.family import Model


class Ia3(Adapter):
    """Learned factors of keys, values and the inner activations of feed-forwards (https://arxiv.org/abs/2205.05638)."""

    VERSION = Version("adapter_ia3", uses=(Adapter.VERSION,))
    PEFT = "IA3"

    targets: tuple[str, ...] = Field(default=("wk", "wv", "w2"), min_length=1)
    """See `Adapter.targets`."""
    inputs: tuple[str, ...] = ("w2",)
    """Those of the targets whose inputs are multiplied; of the others the outputs are."""

    def build(self, name: str, module: nn.Module) -> nn.Module:
        from tidewheel.models.adapting.factors import Factors

        return Factors(self, name, module, of_inputs=self.of_inputs(name))

    def of_inputs(self, name: str) -> bool:
        """Return whether the inputs of the module `name` are multiplied, not its outputs."""
        return any(matches(pattern, name) for pattern in self.inputs)

    def shapes(self, name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {"l": (inputs if self.of_inputs(name) else outputs,)}

    def distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        return 1.0, 0.0

    def to_peft(self, config: Model, values: Mapping[str, torch.Tensor]) -> Form:
        from tidewheel.models.adapting import peft_names

        names = peft_names.their_modules(config)
        tensors: dict[str, torch.Tensor] = {}
        chosen: list[str] = []
        inputs: list[str] = []
        for name, parts in by_module(values).items():
            theirs, value = peft_names.theirs(name, names), parts["l"].float()
            tensors[f"{peft_names.PREFIX}{theirs}.ia3_l"] = (
                value[None] if self.of_inputs(name) else value[:, None]).contiguous()
            chosen.append(theirs)
            if self.of_inputs(name):
                inputs.append(theirs)
        return {"peft_type": self.PEFT, "target_modules": peft_names.shortest(chosen, names.values()),
                "feedforward_modules": peft_names.shortest(inputs, names.values()), "fan_in_fan_out": False,
                "init_ia3_weights": True}, tensors

    @classmethod
    def from_peft(cls, settings: Mapping[str, Setting], tensors: dict[str, torch.Tensor], config: Model,
                  where: str) -> Form:
        from tidewheel.models.adapting import peft_names

        ours = {theirs: name for name, theirs in peft_names.their_modules(config).items()}
        values: dict[str, torch.Tensor] = {}
        inputs: list[str] = []
        for name, value in tensors.items():
            module, _ = peft_names.split(name, ["ia3_l"], ours, where)
            values[parameter_name(ours[module], "l")] = value.float().flatten()
            if value.shape[0] == 1:
                inputs.append(ours[module])
        return {"targets": peft_names.shortest(by_module(values), ours.values()),
                "inputs": peft_names.shortest(inputs, ours.values()) if inputs else []}, values
