"""Mixtral: Mistral's decoder with experts in each layer (https://arxiv.org/abs/2401.04088)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from tidewheel.models.conversion import Conversion
from tidewheel.models.huggingface_settings import Settings, common_settings
from tidewheel.models.moe.family import MixtureFamily
from tidewheel.models.moe.huggingface import expert_weights
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96, "num_experts": 4},
    # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json, and Mixtral-8x22B-v0.1
    "mixtral_8x7b": {"dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336,
                     "max_sequence_length": 32768},
    "mixtral_8x22b": {"dim": 6144, "num_layers": 56, "num_heads": 48, "num_kv_heads": 8, "ffn_dim": 16384,
                      "max_sequence_length": 65536},
}


class Mixtral(MixtureFamily):
    """A Mixtral-style decoder: Llama's attention, and experts whose weights are a softmax over the chosen logits."""

    VERSION: ClassVar[Version] = Version("model_mixtral", uses=(MixtureFamily.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("mixtral",)

    rope_theta: float = Field(default=1e6, gt=0)
    """Base of the RoPE frequencies."""
    balancing: Literal["bias", "auxiliary", "none"] = "auxiliary"
    """How experts get equal loads; see `MixtureOfExperts`. The format at Hugging Face has no bias."""
    auxiliary_loss: float = Field(default=0.02, ge=0)
    """Weight of the auxiliary loss, `router_aux_loss_coef` in config.json of Mixtral-8x7B-v0.1."""

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Attention, Block

        return Block(self, Attention(self), self.feed_forward(layer))

    def hugging_face_weights(self, layer: int, present: Collection[str] | None = None) -> Sequence[Conversion]:
        return expert_weights(self, layer, present, module="block_sparse_moe", projections=("w1", "w3", "w2"))

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Any]:
        self.check_exportable(shared_experts=0, first_dense_layers=0, normalise_weights=True, weight_scale=1.0)
        return {**common_settings(self, "MixtralForCausalLM", "mixtral", vocabulary_size, eos, dtype),
                "intermediate_size": self.expert_width, "num_local_experts": self.num_experts,
                "num_experts_per_tok": self.experts_per_token, "router_aux_loss_coef": self.auxiliary_loss,
                "sliding_window": None}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Self:
        settings = Settings(values, where)
        settings.must_be(hidden_act="silu", attention_bias=False, sliding_window=None, router_jitter_noise=0.0)
        return settings.build(cls, {
            **settings.common(), **settings.rope(theta=1e6), "num_experts": settings.get("num_local_experts"),
            "experts_per_token": settings.get("num_experts_per_tok"),
            "auxiliary_loss": settings.get("router_aux_loss_coef", 0.001)})
