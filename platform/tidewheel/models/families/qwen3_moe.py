"""Qwen 3 with experts (https://arxiv.org/abs/2505.09388): Qwen 3's attention, and many small experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from tidewheel.models.conversion import Conversion
from tidewheel.models.family import Cut
from tidewheel.models.huggingface_settings import Settings, common_settings
from tidewheel.models.moe.family import MixtureFamily
from tidewheel.models.moe.huggingface import expert_weights
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

_COMMON = {"num_kv_heads": 4, "head_dim": 128, "num_experts": 128, "experts_per_token": 8, "max_sequence_length": 40960}
_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "expert_ffn_dim": 32, "num_experts": 8,
              "experts_per_token": 2},
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json, and Qwen3-235B-A22B
    "qwen3_30b_a3b": {**_COMMON, "dim": 2048, "num_layers": 48, "num_heads": 32, "ffn_dim": 6144,
                      "expert_ffn_dim": 768},
    "qwen3_235b_a22b": {**_COMMON, "dim": 4096, "num_layers": 94, "num_heads": 64, "ffn_dim": 12288,
                        "expert_ffn_dim": 1536},
}


class Qwen3Moe(MixtureFamily):
    """A Qwen-3-MoE style decoder: norms on queries and keys, and a softmax over all experts before the choice."""

    VERSION: ClassVar[Version] = Version("model_qwen3_moe", uses=(MixtureFamily.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("qwen3_moe",)

    rope_theta: float = Field(default=1e6, gt=0)
    """Base of the RoPE frequencies."""
    norm_epsilon: float = Field(default=1e-6, gt=0)
    """Added to the mean square in RMSNorm."""
    balancing: Literal["bias", "auxiliary", "none"] = "auxiliary"
    """How experts get equal loads; see `MixtureOfExperts`. The format at Hugging Face has no bias."""
    auxiliary_loss: float = Field(default=1e-3, ge=0)
    """Weight of the auxiliary loss, `router_aux_loss_coef` in config.json of Qwen3-30B-A3B."""

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Attention, Block

        return Block(self, Attention(self, qk_norm=True), self.feed_forward(layer))

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        return {**super().tensor_parallel(layer), "attention.q_norm": "heads", "attention.k_norm": "heads"}

    def extra_parameters(self) -> tuple[int, int]:
        return 0, 2 * self.head_width

    def hugging_face_weights(self, layer: int, present: Collection[str] | None = None) -> Sequence[Conversion]:
        return expert_weights(self, layer, present)

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Any]:
        self.check_exportable(shared_experts=0, weight_scale=1.0)
        return {**common_settings(self, "Qwen3MoeForCausalLM", "qwen3_moe", vocabulary_size, eos, dtype),
                "num_experts": self.num_experts, "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.expert_width, "norm_topk_prob": self.normalise_weights,
                "router_aux_loss_coef": self.auxiliary_loss, "decoder_sparse_step": 1,
                "mlp_only_layers": list(range(self.first_dense_layers)), "sliding_window": None,
                "use_sliding_window": False}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Self:
        settings = Settings(values, where)
        settings.must_be(hidden_act="silu", attention_bias=False, use_sliding_window=False, decoder_sparse_step=1)
        settings.get("sliding_window", None)  # not used
        dense = settings.get("mlp_only_layers", []) or []
        if list(dense) != list(range(len(dense))):
            settings.refuse(f"mlp_only_layers: {dense!r} (only the first layers)")
        common = settings.common()
        return settings.build(cls, {
            **common, **settings.rope(), "num_experts": settings.get("num_experts", None)
            or settings.get("num_local_experts"), "head_dim": common["head_dim"],
            "experts_per_token": settings.get("num_experts_per_tok"), "first_dense_layers": len(dense),
            "expert_ffn_dim": settings.get("moe_intermediate_size"),
            "normalise_weights": settings.get("norm_topk_prob", False),
            "auxiliary_loss": settings.get("router_aux_loss_coef", 1e-3)})
