"""LoRA, with its variants rsLoRA (scale), LoRA+ (learning rates) and PiSSA (start)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from tidewheel.config import Setting
from tidewheel.models.adapter import Adapter
from tidewheel.models.adapting.names import first_match
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tidewheel.models.adapting.peft_forms import Form
    from tidewheel.models.family import Model


class Lora(Adapter):
    """y = W x + scale B A x with A [rank, inputs] and B [outputs, rank] (https://arxiv.org/abs/2106.09685)."""

    VERSION = Version("adapter_lora", uses=(Adapter.VERSION,))
    EMBEDDING = True
    CONSTANT: ClassVar[tuple[str, ...]] = (".a0", ".b0")
    DIRECTED: ClassVar[bool] = False
    """Whether the rows of the sum are scaled to a learned length."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """The scale is alpha / rank."""
    ranks: dict[str, int] = Field(default_factory=dict)
    """Ranks by pattern, as in `targets`, in place of `rank`; the first pattern that matches counts."""
    alphas: dict[str, float] = Field(default_factory=dict)
    """The same of alpha."""
    rank_stabilized: bool = False
    """The scale is alpha / sqrt(rank), so that high ranks learn as fast (rsLoRA, https://arxiv.org/abs/2312.03732)."""
    b_rate: float = Field(default=1.0, gt=0)
    """Learning rate of B as a multiple of A's. LoRA+ (https://arxiv.org/abs/2402.12354) proposes 16."""
    start: Literal["zero", "pissa"] = "zero"
    """zero: A is random and B is 0. pissa: A and B begin as the largest singular values and vectors of W, and what
    they began with is taken off W (https://arxiv.org/abs/2404.02948)."""

    @pydantic.model_validator(mode="after")
    def _positive(self) -> Lora:
        wrong: Mapping[str, Any] = {**self.ranks, **self.alphas}
        for pattern, value in wrong.items():
            if value <= 0:
                raise ValueError(f"{value} for {pattern!r}: ranks and alphas are above 0")
        return self

    def build(self, name: str, module: nn.Module) -> nn.Module:
        from tidewheel.models.adapting.low_rank import LowRank

        return LowRank.of(module, *self.size(name), pissa=self.start == "pissa")

    def size(self, name: str) -> tuple[int, float]:
        """Return the rank and the scale of the module `name`."""
        rank = first_match(self.ranks, name, self.rank)
        alpha = first_match(self.alphas, name, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def count(self, name: str, inputs: int, outputs: int) -> int:
        return self.size(name)[0] * (inputs + outputs)

    def distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        # the variance of peft's Kaiming-uniform A, 1 / (3 inputs)
        return 0.0, (3 * shape[-1]) ** -0.5 if name.endswith(".a") else 0.0

    def to_peft(self, config: Model, values: Mapping[str, torch.Tensor]) -> Form:
        from tidewheel.models.adapting.peft_forms import low_rank_to_peft

        return low_rank_to_peft(config, values, lambda name: self.size(name)[1], stabilized=self.rank_stabilized,
                                directed=self.DIRECTED)

    @classmethod
    def reads_peft(cls, settings: Mapping[str, Setting]) -> bool:
        return settings["peft_type"] == "LORA" and bool(settings.get("use_dora")) == cls.DIRECTED

    @classmethod
    def from_peft(cls, settings: Mapping[str, Setting], tensors: dict[str, torch.Tensor], config: Model,
                  where: str) -> Form:
        from tidewheel.models.adapting.peft_forms import low_rank_from_peft

        return low_rank_from_peft(settings, tensors, config, where)

    def rate_factor(self, name: str) -> float:
        return self.b_rate if name.endswith(".b") else 1.0
