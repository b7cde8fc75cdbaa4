"""Prompt tuning: learned embeddings before every document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from tidewheel.config import Setting
from tidewheel.models.adapter import Adapter, Dimension, Place
from tidewheel.models.adapting.names import parameter_name
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tidewheel.models.adapting.peft_names import Form
    from tidewheel.models.decoder import Decoder
    from tidewheel.models.family import Model


class PromptTuning(Adapter):
    """Learned embeddings, which pass all layers and which every document sees (https://arxiv.org/abs/2104.08691).

    A row has them once, before its documents. A token sees them and its own document, so each document is computed as
    if they stood before it. Positions of tokens begin at `tokens`.
    """

    VERSION = Version("adapter_prompt_tuning", uses=(Adapter.VERSION,))
    PLACE: ClassVar[Place] = "embedding"
    PEFT = "PROMPT_TUNING"
    WORKS_WITH: ClassVar[tuple[Dimension, ...]] = ()

    targets: tuple[str, ...] = Field(default=("embedding",), min_length=1)
    """See `Adapter.targets`."""
    tokens: int = Field(default=16, ge=1)
    """Number of embeddings."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of their initial values."""

    def build(self, name: str, module: nn.Module) -> nn.Module:
        from tidewheel.models.adapting.prompt import Prompt

        return Prompt(self, name, module)

    def shapes(self, name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {"embeddings": (self.tokens, outputs)}

    def prepare(self, model: Decoder) -> None:
        from tidewheel.models.adapting.prompt import make_room

        make_room(model, self.tokens)

    def distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        return 0.0, self.init_std

    def to_peft(self, config: Model, values: Mapping[str, torch.Tensor]) -> Form:
        (matrix,) = values.values()
        return {"peft_type": self.PEFT, "num_virtual_tokens": len(matrix), "num_layers": config.num_layers,
                "token_dim": config.dim, "num_attention_heads": config.num_heads, "num_transformer_submodules": 1,
                "prompt_tuning_init": "RANDOM"}, {"prompt_embeddings": matrix.float().contiguous()}

    @classmethod
    def from_peft(cls, settings: Mapping[str, Setting], tensors: dict[str, torch.Tensor], config: Model,
                  where: str) -> Form:
        from tidewheel.models.adapting.peft_names import embeddings

        matrix = embeddings(tensors, config.dim, where)
        return {"tokens": len(matrix)}, {parameter_name("embedding", "embeddings"): matrix}
