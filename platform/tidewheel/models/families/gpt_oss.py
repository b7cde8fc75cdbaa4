"""GPT-OSS (https://arxiv.org/abs/2508.10925): attention sinks, alternating windows, experts with biases and a clamp."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from tidewheel.models.conversion import Conversion, interleaved, renamed, transposed
from tidewheel.models.family import Cut
from tidewheel.models.huggingface_settings import Settings, common_settings
from tidewheel.models.moe.family import MixtureFamily
from tidewheel.models.moe.huggingface import without_bias
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

_YARN = {"kind": "yarn", "factor": 32.0, "original_length": 4096, "truncate": False}
_COMMON = {"dim": 2880, "num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "ffn_dim": 2880, "experts_per_token": 4,
           "max_sequence_length": 131072, "rope_scaling": _YARN}
_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64, "num_experts": 4,
              "experts_per_token": 2, "sliding_window": 16},
    # https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json, and gpt-oss-120b
    "gpt_oss_20b": {**_COMMON, "num_layers": 24, "num_experts": 32},
    "gpt_oss_120b": {**_COMMON, "num_layers": 36, "num_experts": 128},
}
_WINDOWED, _WHOLE = "sliding_attention", "full_attention"


class GptOss(MixtureFamily):
    """A GPT-OSS style decoder. Even layers see a window, and each head has a sink in its softmax."""

    VERSION: ClassVar[Version] = Version("model_gpt_oss", uses=(MixtureFamily.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    SCORES: ClassVar[Literal["softmax", "chosen_softmax", "sigmoid"]] = "chosen_softmax"
    EXPERT_BIAS: ClassVar[bool] = True
    ACTIVATION: ClassVar[Literal["silu", "clamped"]] = "clamped"

    rope_theta: float = Field(default=150_000.0, gt=0)
    """Base of the RoPE frequencies."""
    sliding_window: int = Field(default=128, ge=1)
    """Tokens that a token of an even layer sees, itself included."""
    balancing: Literal["bias", "auxiliary", "none"] = "auxiliary"
    """How experts get equal loads; see `MixtureOfExperts`. The format at Hugging Face has no bias."""
    auxiliary_loss: float = Field(default=1e-3, ge=0)
    """Weight of the auxiliary loss, the default of `router_aux_loss_coef` in transformers."""

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Attention, Block

        return Block(self, Attention(self, bias=True, output_bias=True, sinks=True), self.feed_forward(layer))

    def window(self, layer: int) -> int | None:
        return self.sliding_window if layer % 2 == 0 else None

    @property
    def plain_attention(self) -> bool:
        return False

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        return {**super().tensor_parallel(layer), "attention.sinks": "per_head"}

    def extra_parameters(self) -> tuple[int, int]:
        return (self.num_heads + 2 * self.kv_heads) * self.head_width + self.num_heads, self.dim

    def hugging_face_weights(self, layer: int, present: Collection[str] | None = None) -> Sequence[Conversion]:
        experts = "ffn.experts."
        return (renamed("attention.sinks.weight", "self_attn.sinks"), without_bias(self),
                renamed("ffn.router.weight", "mlp.router.weight"), renamed("ffn.router.bias", "mlp.router.bias"),
                interleaved((f"{experts}w1", f"{experts}w3"), "mlp.experts.gate_up_proj"),
                interleaved((f"{experts}w1_bias", f"{experts}w3_bias"), "mlp.experts.gate_up_proj_bias"),
                transposed(f"{experts}w2", "mlp.experts.down_proj"),
                renamed(f"{experts}w2_bias", "mlp.experts.down_proj_bias"))

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Any]:
        self.check_exportable(shared_experts=0, first_dense_layers=0, normalise_weights=True, weight_scale=1.0)
        kinds = [_WINDOWED if self.window(layer) else _WHOLE for layer in range(self.num_layers)]
        return {**common_settings(self, "GptOssForCausalLM", "gpt_oss", vocabulary_size, eos, dtype),
                "intermediate_size": self.expert_width, "num_local_experts": self.num_experts,
                "num_experts_per_tok": self.experts_per_token, "router_aux_loss_coef": self.auxiliary_loss,
                "sliding_window": self.sliding_window, "layer_types": kinds, "attention_bias": True,
                "swiglu_limit": 7.0}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Self:
        settings = Settings(values, where)
        settings.must_be(hidden_act="silu", attention_bias=True, swiglu_limit=7.0, swiglu_alpha=1.702)
        for name in ("initial_context_length", "experts_per_token", "router_aux_loss_coef"):
            settings.get(name, None)  # of training, or repeated under other names
        count = settings.get("num_hidden_layers")
        kinds = settings.get("layer_types", None)
        if kinds is not None and list(kinds) != [_WHOLE if layer % 2 else _WINDOWED for layer in range(count)]:
            settings.refuse(f"layer_types: {kinds!r} (only a window in every other layer, from the first on)")
        return settings.build(cls, {
            **settings.common(), **settings.rope(theta=150_000.0),
            "sliding_window": settings.get("sliding_window", 128),
            "num_experts": settings.get("num_local_experts", None) or settings.get("num_experts"),
            "experts_per_token": settings.get("num_experts_per_tok"),
            "auxiliary_loss": settings.get("router_aux_loss_coef", 1e-3)})
