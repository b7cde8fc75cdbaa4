"""Bottleneck adapters: a narrow feed-forward behind the attention and behind the feed-forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from tidewheel.models.adapter import Adapter, Place
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn


class Bottleneck(Adapter):
    """y + up(gelu(down(y))) of what a part adds to the residual stream (https://arxiv.org/abs/1902.00751, section 2.1).

    The weights are [width, dim] and [dim, width], without biases. `up` begins at 0, so that training begins with the
    base model.
    """

    VERSION = Version("adapter_bottleneck", uses=(Adapter.VERSION,))
    PLACE: ClassVar[Place] = "output"

    width: int = Field(default=64, ge=1)
    """Width between the two products."""

    def build(self, name: str, module: nn.Module) -> nn.Module:
        from tidewheel.models.adapting.bottleneck import Narrow

        return Narrow(self, name, module)

    def shapes(self, name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {"down": (self.width, outputs), "up": (outputs, self.width)}

    def distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        return 0.0, shape[-1] ** -0.5 if name.endswith(".down") else 0.0
