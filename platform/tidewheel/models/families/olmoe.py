"""OLMoE (https://arxiv.org/abs/2409.02060): 64 small experts, and norms over all query and all key heads together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from tidewheel.errors import ConfigError
from tidewheel.models.conversion import Conversion
from tidewheel.models.family import Cut
from tidewheel.models.huggingface_settings import Settings, common_settings
from tidewheel.models.moe.family import MixtureFamily
from tidewheel.models.moe.huggingface import expert_weights
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 32, "num_experts": 8,
              "experts_per_token": 2},
    # https://huggingface.co/allenai/OLMoE-1B-7B-0924/blob/main/config.json
    "olmoe_1b_7b": {"dim": 2048, "num_layers": 16, "num_heads": 16, "ffn_dim": 1024, "num_experts": 64,
                    "experts_per_token": 8, "max_sequence_length": 4096},
}


class Olmoe(MixtureFamily):
    """An OLMoE-style decoder: the weights of a token's experts are their shares of a softmax over all, not divided."""

    VERSION: ClassVar[Version] = Version("model_olmoe", uses=(MixtureFamily.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("olmoe",)

    normalise_weights: bool = False
    """Divide the weights of a token's experts by their sum."""
    balancing: Literal["bias", "auxiliary", "none"] = "auxiliary"
    """How experts get equal loads; see `MixtureOfExperts`. The format at Hugging Face has no bias."""
    router_z_loss: float = Field(default=1e-3, ge=0)
    """Weight of the squared log-normaliser of the router's logits (section 2 of https://arxiv.org/abs/2409.02060)."""

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Attention, Block

        return Block(self, Attention(self, qk_norm="width"), self.feed_forward(layer))

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        return {**super().tensor_parallel(layer), "attention.q_norm": "width", "attention.k_norm": "width"}

    def extra_parameters(self) -> tuple[int, int]:
        return (self.num_heads + self.kv_heads) * self.head_width, 0  # of the norms over all heads

    def hugging_face_weights(self, layer: int, present: Collection[str] | None = None) -> Sequence[Conversion]:
        return expert_weights(self, layer, present)

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Any]:
        self.check_exportable(shared_experts=0, first_dense_layers=0, weight_scale=1.0)
        if self.head_width * self.num_heads != self.dim:
            raise ConfigError("transformers' model has heads of dim / num_heads", where="model.head_dim",
                              fix="export models without head_dim")
        return {**common_settings(self, "OlmoeForCausalLM", "olmoe", vocabulary_size, eos, dtype),
                "intermediate_size": self.expert_width, "num_experts": self.num_experts,
                "num_experts_per_tok": self.experts_per_token, "norm_topk_prob": self.normalise_weights,
                "router_aux_loss_coef": self.auxiliary_loss, "clip_qkv": None}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Self:
        settings = Settings(values, where)
        settings.must_be(hidden_act="silu", attention_bias=False, clip_qkv=None)
        return settings.build(cls, {
            **settings.common(), **settings.rope(), "num_experts": settings.get("num_experts"),
            "experts_per_token": settings.get("num_experts_per_tok"),
            "normalise_weights": settings.get("norm_topk_prob", False),
            "auxiliary_loss": settings.get("router_aux_loss_coef", 0.01)})
