"""Mistral: Llama's block with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field

from tidewheel.models.family import Model
from tidewheel.models.gated import Gated
from tidewheel.models.huggingface_settings import Settings, common_settings
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

_7B = {"dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336,
       "max_sequence_length": 32768}
_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 192, "sliding_window": 16,
              "tie_embeddings": True},
    # https://arxiv.org/abs/2310.06825, table 1, and https://huggingface.co/mistralai/Mistral-7B-v0.1
    "mistral_7b": {**_7B, "sliding_window": 4096},
    # https://huggingface.co/mistralai/Mistral-7B-v0.3/blob/main/config.json
    "mistral_7b_v0.3": {**_7B, "sliding_window": None, "rope_theta": 1e6},
    # https://huggingface.co/mistralai/Mistral-Nemo-Base-2407/blob/main/config.json
    "mistral_nemo_12b": {"dim": 5120, "num_layers": 40, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
                         "ffn_dim": 14336, "max_sequence_length": 131072, "rope_theta": 1e6, "sliding_window": None},
}


class Mistral(Gated):
    """A Mistral style decoder (https://arxiv.org/abs/2310.06825): Llama's with a sliding window."""

    VERSION: ClassVar[Version] = Version("model_mistral", uses=(Model.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("mistral",)

    sliding_window: int | None = Field(default=4096, ge=1)
    """Tokens that a token sees, itself included; null: all earlier ones of its document."""

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Attention, Block, SwiGLU

        return Block(self, Attention(self), SwiGLU(self.dim, self.ffn_width, fused=self.fused_products))

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Any]:
        values = common_settings(self, "MistralForCausalLM", "mistral", vocabulary_size, eos, dtype)
        return {**values, "sliding_window": self.sliding_window}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Self:
        settings = Settings(values, where)
        settings.must_be(hidden_act="silu", attention_bias=False)
        window = settings.get("sliding_window", 4096)  # transformers' default
        return settings.build(cls, {**settings.common(), **settings.rope(), "sliding_window": window})
