"""Llama 2 and 3 and, with norms on queries and keys, Qwen 3: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tidewheel.errors import ConfigError
from tidewheel.models.family import Cut, Model
from tidewheel.models.gated import Gated
from tidewheel.models.huggingface_settings import Settings, common_settings
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
    # https://huggingface.co/meta-llama/Llama-3.2-3B/blob/main/config.json
    "llama3_3b": {**_LLAMA3, **_LLAMA32, "dim": 3072, "num_layers": 28, "num_heads": 24, "ffn_dim": 8192,
                  "head_dim": 128, "tie_embeddings": True},
    # https://arxiv.org/abs/2307.09288, section 2.2, and config.json of Llama-2-7b
    "llama2_7b": {"dim": 4096, "num_layers": 32, "num_heads": 32, "ffn_dim": 11008, "qk_norm": False,
                  "max_sequence_length": 4096},
    "llama2_13b": {"dim": 5120, "num_layers": 40, "num_heads": 40, "ffn_dim": 13824, "qk_norm": False,
                   "max_sequence_length": 4096},
    "llama2_70b": {"dim": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8, "ffn_dim": 28672,
                   "qk_norm": False, "max_sequence_length": 4096},
    # https://arxiv.org/abs/2407.21783, table 3; 8,192 positions, as before its long-context stage
    "8b": _8B, "llama3_8b": _8B,
    "70b": _70B, "llama3_70b": _70B,
    "llama3_405b": {**_LLAMA3, "dim": 16384, "num_layers": 126, "num_heads": 128, "ffn_dim": 53248},
    # https://arxiv.org/abs/2505.09388, table 1, and config.json of https://huggingface.co/Qwen/Qwen3-0.6B and so on
    "qwen3_0.6b": {**_QWEN3, "dim": 1024, "num_layers": 28, "num_heads": 16, "ffn_dim": 3072, "tie_embeddings": True},
    "qwen3_1.7b": {**_QWEN3, "dim": 2048, "num_layers": 28, "num_heads": 16, "ffn_dim": 6144, "tie_embeddings": True},
    "qwen3_4b": {**_QWEN3, "dim": 2560, "num_layers": 36, "num_heads": 32, "ffn_dim": 9728, "tie_embeddings": True},
    "qwen3_8b": {**_QWEN3, "dim": 4096, "num_layers": 36, "num_heads": 32, "ffn_dim": 12288},
    "qwen3_14b": {**_QWEN3, "dim": 5120, "num_layers": 40, "num_heads": 40, "ffn_dim": 17408},
    "qwen3_32b": {**_QWEN3, "dim": 5120, "num_layers": 64, "num_heads": 64, "ffn_dim": 25600},
}


class Llama(Gated):
    """A Llama-3 (https://arxiv.org/abs/2407.21783) or Qwen-3 (https://arxiv.org/abs/2505.09388) style decoder: RMSNorm,
    RoPE, grouped-query attention, SwiGLU."""

    VERSION: ClassVar[Version] = Version("model_llama", uses=(Model.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("llama", "qwen3")

    qk_norm: bool = True
    """Apply RMSNorm to each query and key head, as Qwen 3 does. It bounds attention logits at high learning rates."""

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Attention, Block, SwiGLU

        return Block(self, Attention(self, qk_norm=self.qk_norm), SwiGLU(
            self.dim, self.ffn_width, fused=self.fused_products))

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        plan = super().tensor_parallel(layer)
        return {**plan, "attention.q_norm": "heads", "attention.k_norm": "heads"} if self.qk_norm else plan

    def extra_parameters(self) -> tuple[int, int]:
        return 0, 2 * self.head_width if self.qk_norm else 0

    @property
    def normed_heads(self) -> int:
        return self.num_heads + self.kv_heads if self.qk_norm else 0

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
        values = common_settings(self, f"{kind}ForCausalLM", kind.lower(), vocabulary_size, eos, dtype)
        return values if self.qk_norm else {**values, "mlp_bias": False}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Self:
        settings = Settings(values, where)
        settings.must_be(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False)
        settings.get("layer_types", None)  # follows from use_sliding_window
        settings.get("sliding_window", None)
        common = settings.common()
        is_qwen = values["model_type"] == "qwen3"
        if is_qwen and not common["head_dim"]:
            common["head_dim"] = 128  # transformers' default
        return settings.build(cls, {**common, **settings.rope(), "qk_norm": is_qwen})
