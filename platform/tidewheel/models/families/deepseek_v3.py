"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437): latent attention, shared experts, and routing limited to groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from tidewheel.models.config import Rope
from tidewheel.models.conversion import Conversion
from tidewheel.models.family import Cut
from tidewheel.models.huggingface_settings import Settings, common_settings
from tidewheel.models.moe.family import MixtureFamily
from tidewheel.models.moe.huggingface import expert_weights
from tidewheel.models.rope_scaling import YarnScaling, yarn_magnitude
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

_YARN = {"kind": "yarn", "factor": 40.0, "original_length": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 3, "num_heads": 4, "ffn_dim": 96, "expert_ffn_dim": 32, "num_experts": 8,
              "experts_per_token": 2, "expert_groups": 4, "groups_per_token": 2, "first_dense_layers": 1,
              "query_rank": 24, "key_rank": 16, "plain_head_dim": 16, "turning_head_dim": 8, "value_head_dim": 16,
              "max_sequence_length": 4096},
    # https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, without the multi-token prediction layer
    "deepseek_v3": {"dim": 7168, "num_layers": 61, "num_heads": 128, "ffn_dim": 18432, "expert_ffn_dim": 2048,
                    "num_experts": 256, "experts_per_token": 8, "expert_groups": 8, "groups_per_token": 4,
                    "first_dense_layers": 3, "query_rank": 1536, "key_rank": 512, "max_sequence_length": 163840,
                    "rope_scaling": _YARN},
}


class DeepseekV3(MixtureFamily):
    """A DeepSeek-V3 style decoder. Its multi-token prediction layer is not built."""

    VERSION: ClassVar[Version] = Version("model_deepseek_v3", uses=(MixtureFamily.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("deepseek_v3",)
    SCORES: ClassVar[Literal["softmax", "chosen_softmax", "sigmoid"]] = "sigmoid"
    SCORE_EPSILON: ClassVar[float] = 1e-20

    norm_epsilon: float = Field(default=1e-6, gt=0)
    """Added to the mean square in RMSNorm."""
    shared_experts: int = Field(default=1, ge=0)
    """Experts that compute every token; they are one feed-forward of shared_experts x expert_ffn_dim."""
    weight_scale: float = Field(default=2.5, gt=0)
    """Factor of the weights of a token's experts."""
    query_rank: int | None = Field(default=None, ge=1)
    """Width of the latent vector of queries; default: queries come from the residual stream."""
    key_rank: int = Field(default=512, ge=1)
    """Width of the latent vector of keys and values."""
    plain_head_dim: int = Field(default=128, ge=1)
    """Entries of a query or key head that RoPE leaves alone."""
    turning_head_dim: int = Field(default=64, ge=2)
    """Entries that RoPE turns, even; all heads share those of keys."""
    value_head_dim: int = Field(default=128, ge=1)
    """Width of a value head."""

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Block
        from tidewheel.models.blocks.latent_attention import LatentAttention, LatentWidths

        widths = LatentWidths(self.query_rank, self.key_rank, self.plain_head_dim, self.turning_head_dim,
                              self.value_head_dim)
        attention = LatentAttention(self.dim, self.num_heads, widths, self.attention_scale)
        return Block(self, attention, self.feed_forward(layer))

    @property
    def head_width(self) -> int:
        return self.plain_head_dim + self.turning_head_dim

    @property
    def attention_scale(self) -> float:
        """Return the factor of scores, which YaRN raises by the square of its magnitude."""
        scale = float(self.head_width**-0.5)
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_scaling.mscale_all_dim:
            scale *= yarn_magnitude(self.rope_scaling.factor, self.rope_scaling.mscale_all_dim) ** 2
        return scale

    def rope(self, layer: int) -> Rope | None:
        return Rope(self.turning_head_dim, self.rope_theta, self.rope_scaling, self.max_sequence_length)

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        plan = {name: cut for name, cut in super().tensor_parallel(layer).items()
                if name not in ("attention.wq", "attention.wk", "attention.wv")}
        whole: dict[str, Cut] = {"attention.wkv_a": "whole", "attention.kv_norm": "whole"}
        if self.query_rank is not None:
            whole |= {"attention.wq_a": "whole", "attention.q_norm": "whole"}
        return {**plan, **whole, "attention.wq_b": "per_head", "attention.wkv_b": "per_head"}

    def extra_parameters(self) -> tuple[int, int]:
        return 0, self.key_rank + (self.query_rank or 0)

    @property
    def attention_matrices(self) -> int:
        rank = self.query_rank
        queries = (self.dim if rank is None else rank) * self.num_heads * self.head_width + self.dim * (rank or 0)
        keys = self.dim * (self.key_rank + self.turning_head_dim)
        expanded = self.key_rank * self.num_heads * (self.plain_head_dim + self.value_head_dim)
        return queries + keys + expanded + self.num_heads * self.value_head_dim * self.dim

    def hugging_face_names(self) -> dict[str, str]:
        queries = {"attention.wq_b": "self_attn.q_proj"}
        if self.query_rank is not None:
            queries = {"attention.wq_a": "self_attn.q_a_proj", "attention.q_norm": "self_attn.q_a_layernorm",
                       "attention.wq_b": "self_attn.q_b_proj"}
        return {**super().hugging_face_names(), **queries, "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
                "attention.kv_norm": "self_attn.kv_a_layernorm", "attention.wkv_b": "self_attn.kv_b_proj",
                "ffn.shared.w1": "mlp.shared_experts.gate_proj", "ffn.shared.w3": "mlp.shared_experts.up_proj",
                "ffn.shared.w2": "mlp.shared_experts.down_proj"}

    def hugging_face_weights(self, layer: int, present: Collection[str] | None = None) -> Sequence[Conversion]:
        return expert_weights(self, layer, present, bias="mlp.gate.e_score_correction_bias")

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Any]:
        self.check_exportable()
        return {**common_settings(self, "DeepseekV3ForCausalLM", "deepseek_v3", vocabulary_size, eos, dtype),
                "head_dim": self.turning_head_dim, "num_key_value_heads": self.num_heads,
                "moe_intermediate_size": self.expert_width, "n_shared_experts": self.shared_experts,
                "n_routed_experts": self.num_experts, "routed_scaling_factor": self.weight_scale,
                "kv_lora_rank": self.key_rank, "q_lora_rank": self.query_rank,
                "qk_rope_head_dim": self.turning_head_dim, "v_head_dim": self.value_head_dim,
                "qk_nope_head_dim": self.plain_head_dim, "n_group": self.expert_groups,
                "topk_group": self.groups_per_token, "num_experts_per_tok": self.experts_per_token,
                "first_k_dense_replace": self.first_dense_layers, "norm_topk_prob": self.normalise_weights,
                "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
                "num_nextn_predict_layers": 0}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Self:
        settings = Settings(values, where)
        settings.must_be(hidden_act="silu", attention_bias=False, rope_interleave=True, scoring_func="sigmoid",
                         topk_method="noaux_tc", moe_layer_freq=1)
        for name in ("num_nextn_predict_layers", "num_mtp_layers", "qk_head_dim", "ep_size", "aux_loss_alpha",
                     "seq_aux", "num_key_value_heads", "head_dim"):
            settings.get(name, None)  # of training, or they follow from others
        common = settings.common()
        del common["num_kv_heads"], common["head_dim"]
        return settings.build(cls, {
            **common, **settings.rope(), "expert_ffn_dim": settings.get("moe_intermediate_size"),
            "num_experts": settings.get("n_routed_experts", None) or settings.get("num_local_experts"),
            "experts_per_token": settings.get("num_experts_per_tok"),
            "shared_experts": settings.get("n_shared_experts", 1) or 0,
            "weight_scale": settings.get("routed_scaling_factor", 1.0), "key_rank": settings.get("kv_lora_rank"),
            "query_rank": settings.get("q_lora_rank", None), "turning_head_dim": settings.get("qk_rope_head_dim"),
            "plain_head_dim": settings.get("qk_nope_head_dim"), "value_head_dim": settings.get("v_head_dim"),
            "expert_groups": settings.get("n_group", 1) or 1, "groups_per_token": settings.get("topk_group", 1) or 1,
            "first_dense_layers": settings.get("first_k_dense_replace", 0),
            "normalise_weights": settings.get("norm_topk_prob", True)})
