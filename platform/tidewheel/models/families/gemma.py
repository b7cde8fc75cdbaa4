"""Gemma 2 and 3: norms before and after each part, alternating windows, GeGLU, and a scaled, tied embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field

from tidewheel.models.config import Rope
from tidewheel.models.family import Cut, Model
from tidewheel.models.gated import Gated
from tidewheel.models.huggingface_settings import Settings, common_settings
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

_GEMMA2 = {"head_dim": 256, "max_sequence_length": 8192, "sliding_window": 4096}
_GEMMA3 = {"head_dim": 256, "rope_theta": 1e6, "local_rope_theta": 1e4, "full_every": 6, "qk_norm": True,
           "attention_soft_cap": None, "final_soft_cap": None, "max_sequence_length": 131072, "sliding_window": 1024,
           "rope_scaling": {"kind": "linear", "factor": 8.0}}
_SHORT3 = {**_GEMMA3, "max_sequence_length": 32768, "sliding_window": 512, "rope_scaling": None, "num_kv_heads": 1}
_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 192, "sliding_window": 16},
    "debug_3": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 192, "sliding_window": 16,
                "qk_norm": True, "attention_soft_cap": None, "final_soft_cap": None, "local_rope_theta": 1e3},
    # https://arxiv.org/abs/2408.00118, table 1, and config.json of https://huggingface.co/google/gemma-2-2b and so on
    "gemma2_2b": {**_GEMMA2, "dim": 2304, "num_layers": 26, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 9216},
    "gemma2_9b": {**_GEMMA2, "dim": 3584, "num_layers": 42, "num_heads": 16, "num_kv_heads": 8, "ffn_dim": 14336},
    "gemma2_27b": {**_GEMMA2, "dim": 4608, "num_layers": 46, "num_heads": 32, "num_kv_heads": 16, "ffn_dim": 36864,
                   "head_dim": 128, "query_scale": 144},
    # https://arxiv.org/abs/2503.19786, table 1, and config.json of https://huggingface.co/google/gemma-3-1b-pt and so
    # on; of 4b and larger the language model
    "gemma3_270m": {**_SHORT3, "dim": 640, "num_layers": 18, "num_heads": 4, "ffn_dim": 2048},
    "gemma3_1b": {**_SHORT3, "dim": 1152, "num_layers": 26, "num_heads": 4, "ffn_dim": 6912},
    "gemma3_4b": {**_GEMMA3, "dim": 2560, "num_layers": 34, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 10240},
    "gemma3_12b": {**_GEMMA3, "dim": 3840, "num_layers": 48, "num_heads": 16, "num_kv_heads": 8, "ffn_dim": 15360},
    "gemma3_27b": {**_GEMMA3, "dim": 5376, "num_layers": 62, "num_heads": 32, "num_kv_heads": 16, "ffn_dim": 21504,
                   "head_dim": 128, "query_scale": 168},
}
_GELU = "gelu_pytorch_tanh"


class Gemma(Gated):
    """A Gemma-2 (https://arxiv.org/abs/2408.00118) or Gemma-3 (https://arxiv.org/abs/2503.19786) style decoder."""

    VERSION: ClassVar[Version] = Version("model_gemma", uses=(Model.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("gemma2", "gemma3_text")
    NORM_WEIGHT: ClassVar[float] = 0.0  # norms multiply by 1 + weight

    tie_embeddings: bool = True
    """Share one matrix between the embedding and the output."""
    norm_epsilon: float = Field(default=1e-6, gt=0)
    """Added to the mean square in RMSNorm."""
    init_std: float | None = Field(default=0.02, gt=0)
    """Standard deviation of initial weights. That of projections into the residual stream is divided by
    sqrt(2 num_layers)."""
    sliding_window: int = Field(default=4096, ge=1)
    """Tokens that a token sees in local layers, itself included."""
    full_every: int = Field(default=2, ge=1)
    """Every n-th layer is global: a token sees all earlier ones of its document. 2 in Gemma 2, 6 in Gemma 3."""
    local_rope_theta: float | None = Field(default=None, gt=0)
    """Base of the RoPE frequencies of local layers, which are not scaled; default: as in global layers."""
    query_scale: int | None = Field(default=None, ge=1)
    """Scores are divided by the square root of this; default: the width of a head."""
    qk_norm: bool = False
    """Apply RMSNorm to each query and key head, as Gemma 3 does."""
    attention_soft_cap: float | None = Field(default=50.0, gt=0)
    """Bound attention scores to c tanh(scores / c), as Gemma 2 does; null: they are not bounded."""
    final_soft_cap: float | None = Field(default=30.0, gt=0)
    """Bound logits to c tanh(logits / c), as Gemma 2 does; null: they are not bounded."""

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Attention, Block, GatedFeedForward
        from tidewheel.models.blocks.feed_forward import gelu_tanh

        scale = None if self.query_scale is None else self.query_scale**-0.5
        attention = Attention(self, qk_norm=self.qk_norm, scale=scale, soft_cap=self.attention_soft_cap)
        ffn = GatedFeedForward(self.dim, self.ffn_width, gelu_tanh, fused=self.fused_products)
        return Block(self, attention, ffn, post_norm=True)

    def norm(self, width: int | None = None) -> nn.Module:
        from tidewheel.models.blocks import ZeroCentredRMSNorm

        return ZeroCentredRMSNorm(width or self.dim, self.norm_epsilon)

    def is_local(self, layer: int) -> bool:
        """Return whether a layer has a window."""
        return (layer + 1) % self.full_every != 0

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.is_local(layer) else None

    def rope(self, layer: int) -> Rope | None:
        if self.is_local(layer) and self.local_rope_theta is not None:
            return Rope(self.head_width, self.local_rope_theta)
        return super().rope(layer)

    @property
    def embedding_scale(self) -> float:
        return float(self.dim**0.5)

    @property
    def logit_soft_cap(self) -> float | None:
        return self.final_soft_cap

    @property
    def plain_attention(self) -> bool:
        return self.attention_soft_cap is None

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        plan: dict[str, Cut] = {**super().tensor_parallel(layer), "attention_post_norm": "added",
                                "ffn_post_norm": "added"}
        return {**plan, "attention.q_norm": "heads", "attention.k_norm": "heads"} if self.qk_norm else plan

    def extra_parameters(self) -> tuple[int, int]:
        return 0, 2 * self.dim + (2 * self.head_width if self.qk_norm else 0)

    @property
    def stream_norms(self) -> int:
        return 4

    @property
    def normed_heads(self) -> int:
        return self.num_heads + self.kv_heads if self.qk_norm else 0

    def hugging_face_names(self) -> dict[str, str]:
        return {**super().hugging_face_names(), "attention_post_norm": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Any]:
        """Return the content of config.json: of Gemma 3 if queries and keys are normalised, else of Gemma 2."""
        kind, model_type = ("Gemma3", "gemma3_text") if self.qk_norm else ("Gemma2", "gemma2")
        values = common_settings(self, f"{kind}ForCausalLM", model_type, vocabulary_size, eos, dtype)
        del values["hidden_act"]
        if self.qk_norm:
            local = self.rope_theta if self.local_rope_theta is None else self.local_rope_theta
            values |= {"rope_local_base_freq": local, "rope_parameters": {  # the first in transformers 4
                "full_attention": values["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": local}}}
        types = ["sliding_attention" if self.is_local(layer) else "full_attention" for layer in range(self.num_layers)]
        return {**values, "hidden_activation": _GELU, "layer_types": types, "sliding_window": self.sliding_window,
                "query_pre_attn_scalar": self.query_scale or self.head_width,
                "attn_logit_softcapping": self.attention_soft_cap, "final_logit_softcapping": self.final_soft_cap}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Self:
        settings = Settings(values, where)
        is_third = values["model_type"] == "gemma3_text"
        settings.must_be(hidden_activation=_GELU, attention_bias=False)
        settings.get("hidden_act", None)  # transformers computes hidden_activation
        every = settings.get("sliding_window_pattern", None) or settings.get("_sliding_window_pattern", None) or (
            6 if is_third else 2)
        if (types := settings.get("layer_types", None)) is not None:
            every = next((index + 1 for index, name in enumerate(types) if name == "full_attention"), len(types) + 1)
            if types != ["full_attention" if index % every == every - 1 else "sliding_attention"
                         for index in range(len(types))]:
                settings.refuse(f"layer_types: {types!r}")
        common = {**settings.common(), "head_dim": settings.get("head_dim", 256), "qk_norm": is_third,
                  "tie_embeddings": settings.get("tie_word_embeddings", True)}
        parameters = settings.get("rope_parameters", None) or {}
        if is_third:
            theta = settings.get("rope_theta", 1e6)
            scaled = settings.get("rope_scaling", None) or {}
            full = parameters.get("full_attention") or {"rope_theta": theta, **scaled}
            sliding = parameters.get("sliding_attention") or {}
            local = settings.rope(sliding, settings.get("rope_local_base_freq", 1e4))
            common |= {**settings.rope(full, theta), "local_rope_theta": local["rope_theta"]}
            if local["rope_scaling"] is not None:
                settings.refuse(f"rope_parameters of local layers: {sliding!r}")
        else:
            common |= settings.rope()
        return settings.build(cls, {
            **common, "sliding_window": settings.get("sliding_window", 4096), "full_every": every,
            "query_scale": settings.get("query_pre_attn_scalar", 256),
            "attention_soft_cap": settings.get("attn_logit_softcapping", None if is_third else 50.0),
            "final_soft_cap": settings.get("final_logit_softcapping", None if is_third else 30.0)})
