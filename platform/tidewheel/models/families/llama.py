"""Llama 2 and 3 and, with norms on queries and keys, Qwen 3: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import pydantic

from tidewheel.errors import ConfigError
from tidewheel.models.family import Cut, FeedForwardShape, Model
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

_LLAMA3 = {"num_kv_heads": 8, "rope_theta": 5e5, "norm_epsilon": 1e-5, "qk_norm": False, "max_sequence_length": 8192}
_LLAMA32 = {"max_sequence_length": 131072, "rope_scaling": {
    "factor": 32.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_length": 8192}}
_QWEN3 = {"num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6, "norm_epsilon": 1e-6, "qk_norm": True,
          "max_sequence_length": 40960}
_125M = {**_LLAMA3, "dim": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "ffn_dim": 2048,
         "tie_embeddings": True}
_1B = {**_LLAMA3, "dim": 2048, "num_layers": 16, "num_heads": 32, "ffn_dim": 8192}
_8B = {**_LLAMA3, "dim": 4096, "num_layers": 32, "num_heads": 32, "ffn_dim": 14336}
_70B = {**_LLAMA3, "dim": 8192, "num_layers": 80, "num_heads": 64, "ffn_dim": 28672}

_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 192, "tie_embeddings": True},
    # depth and width of GPT-3's smallest model (https://arxiv.org/abs/2005.14165, table 2.1), blocks of Llama 3
    "125m": _125M, "llama3_125m": _125M,
    # Llama-3.2-1B's shape for training from scratch: with an output matrix and without long-context scaling
    "1b": _1B,
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
    "llama3_1b": {**_1B, **_LLAMA32, "head_dim": 64, "tie_embeddings": True},
    # https://arxiv.org/abs/2307.09288, section 2.2, and config.json of Llama-2-7b
    "llama2_7b": {"dim": 4096, "num_layers": 32, "num_heads": 32, "ffn_dim": 11008, "qk_norm": False,
                  "max_sequence_length": 4096},
    # https://arxiv.org/abs/2407.21783, table 3; 8,192 positions, as before its long-context stage
    "8b": _8B, "llama3_8b": _8B,
    "70b": _70B, "llama3_70b": _70B,
    # https://arxiv.org/abs/2505.09388, table 1, and config.json of https://huggingface.co/Qwen/Qwen3-0.6B and so on
    "qwen3_0.6b": {**_QWEN3, "dim": 1024, "num_layers": 28, "num_heads": 16, "ffn_dim": 3072, "tie_embeddings": True},
    "qwen3_1.7b": {**_QWEN3, "dim": 2048, "num_layers": 28, "num_heads": 16, "ffn_dim": 6144, "tie_embeddings": True},
    "qwen3_4b": {**_QWEN3, "dim": 2560, "num_layers": 36, "num_heads": 32, "ffn_dim": 9728, "tie_embeddings": True},
    "qwen3_8b": {**_QWEN3, "dim": 4096, "num_layers": 36, "num_heads": 32, "ffn_dim": 12288},
    "qwen3_14b": {**_QWEN3, "dim": 5120, "num_layers": 40, "num_heads": 40, "ffn_dim": 17408},
    "qwen3_32b": {**_QWEN3, "dim": 5120, "num_layers": 64, "num_heads": 64, "ffn_dim": 25600},
}
_NAMES = {
    "attention_norm": "input_layernorm", "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn.w1": "mlp.gate_proj",
    "ffn.w3": "mlp.up_proj", "ffn.w2": "mlp.down_proj"}
_PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
          "partial_rotary_factor": 1.0}
"""Settings of config.json that must have this value, which is also their default."""


class Llama(Model):
    """A Llama-3 (https://arxiv.org/abs/2407.21783) or Qwen-3 (https://arxiv.org/abs/2505.09388) style decoder: RMSNorm,
    RoPE, grouped-query attention, SwiGLU."""

    VERSION: ClassVar[Version] = Version("model_llama", uses=(Model.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    FEED_FORWARD: ClassVar[FeedForwardShape] = FeedForwardShape(inputs=2, kept=4, kept_compiled=3)
    RESIDUAL_OUTPUTS: ClassVar[tuple[str, ...]] = ("attention.wo.weight", "ffn.w2.weight")
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("llama", "qwen3")

    qk_norm: bool = True
    """Apply RMSNorm to each query and key head, as Qwen 3 does. It bounds attention logits at high learning rates."""

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Attention, Block, SwiGLU

        return Block(self, Attention(self, qk_norm=self.qk_norm), SwiGLU(
            self.dim, self.ffn_width, fused=self.fused_products))

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        plan: dict[str, Cut] = {**super().tensor_parallel(layer), "ffn.w1": "columns", "ffn.w3": "columns",
                                "ffn.w2": "rows"}
        return {**plan, "attention.q_norm": "heads", "attention.k_norm": "heads"} if self.qk_norm else plan

    def extra_parameters(self) -> tuple[int, int]:
        return 0, 2 * self.head_width if self.qk_norm else 0

    @property
    def ffn_width(self) -> int:
        return self.ffn_dim or -(-8 * self.dim // 3 // 64) * 64

    def hugging_face_names(self) -> dict[str, str]:
        return _NAMES

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Any]:
        """Return the content of config.json: of Qwen 3 if queries and keys are normalised, else of Llama.

        Args:
            vocabulary_size: rows of the embedding.
            eos: id of the token that ends a document.
            dtype: of the weights.

        Raises:
            ConfigError: the widths are not possible in transformers' Llama.
        """
        if not self.qk_norm and self.dim % self.num_heads:
            raise ConfigError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}, which transformers "
                              "requires of Llama", where="model", fix="export models with such widths or with qk_norm")
        kind = "Qwen3" if self.qk_norm else "Llama"
        rope: dict[str, Any] = {"rope_type": "default"}
        if (scaling := self.rope_scaling) is not None:
            rope = {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_frequency_factor,
                    "high_freq_factor": scaling.high_frequency_factor,
                    "original_max_position_embeddings": scaling.original_length}
        values = {
            "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "vocab_size": vocabulary_size,
            "hidden_size": self.dim, "intermediate_size": self.ffn_width, "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width, "max_position_embeddings": self.max_sequence_length,
            "rms_norm_eps": self.norm_epsilon, "tie_word_embeddings": self.tie_embeddings, "hidden_act": "silu",
            "attention_bias": False, "attention_dropout": 0.0, "initializer_range": self.weight_std,
            "rope_theta": self.rope_theta, "rope_scaling": rope if scaling else None,  # transformers 4
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},  # transformers 5
            "bos_token_id": None, "eos_token_id": eos, "torch_dtype": dtype}
        return values if self.qk_norm else {**values, "mlp_bias": False}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Llama:
        """Return the configuration of a config.json of Llama or Qwen 3.

        Args:
            values: its content.
            where: its URI, for messages.

        Raises:
            ConfigError: the model has biases, sliding windows or another RoPE, or a setting is missing.
        """
        odd = [f"{name}: {values[name]!r}" for name, plain in _PLAIN.items() if values.get(name, plain) != plain]
        rope = {"rope_theta": values.get("rope_theta", 10_000.0), "rope_type": "default",
                **(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
        kind = rope.get("type", rope["rope_type"]) if rope["rope_type"] == "default" else rope["rope_type"]
        if kind not in ("default", "llama3"):
            odd.append(f"rope_type: {kind!r}")
        if odd:
            raise ConfigError(f"not supported: {', '.join(odd)}", where=where,
                              fix="models without biases and sliding windows, with plain or Llama-3 RoPE, can be "
                              "imported")
        try:
            scaling = None if kind == "default" else {
                "factor": rope["factor"], "low_frequency_factor": rope["low_freq_factor"],
                "high_frequency_factor": rope["high_freq_factor"],
                "original_length": rope["original_max_position_embeddings"]}
            return cls.model_validate({
                "dim": values["hidden_size"], "num_layers": values["num_hidden_layers"],
                "num_heads": values["num_attention_heads"],
                "num_kv_heads": values.get("num_key_value_heads") or values["num_attention_heads"],
                "head_dim": values.get("head_dim") or (128 if values["model_type"] == "qwen3" else None),
                "ffn_dim": values["intermediate_size"], "max_sequence_length": values["max_position_embeddings"],
                "rope_theta": rope["rope_theta"], "rope_scaling": scaling, "norm_epsilon": values["rms_norm_eps"],
                "qk_norm": values["model_type"] == "qwen3", "tie_embeddings": values.get("tie_word_embeddings", False)})
        except (KeyError, TypeError, pydantic.ValidationError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise ConfigError(f"config.json is not complete: {reason[:300]}", where=where,
                              fix="download the model again") from None
