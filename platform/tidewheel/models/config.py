"""The shape of a decoder, as configuration. Nothing here imports torch."""

from __future__ import annotations

import difflib
from typing import Any

import pydantic
from pydantic import Field

from tidewheel.config import Config

PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 192, "tie_embeddings": True},
    # Qwen3-0.6B: https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
    "qwen3_0.6b": {"dim": 1024, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "ffn_dim": 3072,
                   "max_sequence_length": 40960, "rope_theta": 1e6, "norm_epsilon": 1e-6, "qk_norm": True,
                   "tie_embeddings": True},
    # Llama-3.2-1B and Llama-3-8B, without the long-context RoPE scaling
    "llama3_1b": {"dim": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 8192,
                  "max_sequence_length": 8192, "rope_theta": 5e5, "qk_norm": False, "tie_embeddings": True},
    "llama3_8b": {"dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336,
                  "max_sequence_length": 8192, "rope_theta": 5e5, "qk_norm": False},
}


class ModelConfig(Config):
    """A Llama-3 / Qwen-3 style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    preset: str = Field(default="", exclude=True)
    """Start from a named shape (debug, qwen3_0.6b, llama3_1b, llama3_8b); other keys change it."""
    vocabulary_size: int | None = Field(default=None, ge=2)
    """Rows of the embedding; default: the padded vocabulary of the shard set."""
    dim: int = Field(default=256, ge=8)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1)
    """Number of blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Query heads."""
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads, each shared by num_heads / num_kv_heads query heads; default: num_heads."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of a head, even; default: dim / num_heads."""
    ffn_dim: int | None = Field(default=None, ge=8)
    """Inner width of the SwiGLU layer; default: 8/3 dim, rounded up to a multiple of 64."""
    max_sequence_length: int = Field(default=8192, ge=2)
    """Positions for which RoPE is tabulated; sequences may be shorter."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the RoPE frequencies."""
    norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    qk_norm: bool = True
    """RMSNorm on each query and key head (Qwen 3): keeps attention logits bounded at high learning rates."""
    tie_embeddings: bool = False
    """One matrix for the embedding and the output."""
    init_std: float | None = Field(default=None, gt=0)
    """Standard deviation of initial weights, default 1 / sqrt(dim); projections into the residual stream get it
    / sqrt(2 num_layers)."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: Any) -> Any:
        name = values.get("preset") if isinstance(values, dict) else None
        if not name:
            return values
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no preset {name!r}{hint}; presets: {', '.join(PRESETS)}")
        return {**PRESETS[name], **values}

    @pydantic.model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}")
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}; set head_dim")
        if self.head_width % 2:
            raise ValueError(f"the head width {self.head_width} is odd; RoPE turns pairs")
        return self

    @property
    def kv_heads(self) -> int:
        """Key and value heads, resolved."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Width of a head, resolved."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def weight_std(self) -> float:
        """Standard deviation of initial weights, resolved."""
        return self.init_std or self.dim**-0.5

    @property
    def ffn_width(self) -> int:
        """Inner width of the SwiGLU layer, resolved."""
        return self.ffn_dim or -(-8 * self.dim // 3 // 64) * 64

    def matmul_parameters(self, vocabulary_size: int) -> int:
        """Parameters that multiply every token: the blocks and the output matrix, not the embedding look-up."""
        attention = 2 * self.dim * self.head_width * (self.num_heads + self.kv_heads)
        return self.num_layers * (attention + 3 * self.dim * self.ffn_width) + vocabulary_size * self.dim

    def flops_per_token(self, vocabulary_size: int, sequence_length: int) -> int:
        """Training FLOPs per token: 6 N + 12 layers x heads x head width x L.

        N is `matmul_parameters`; attention counts as full; recomputation does not count (the PaLM convention,
        https://arxiv.org/abs/2204.02311 appendix B).
        """
        attention = 12 * self.num_layers * self.num_heads * self.head_width * sequence_length
        return 6 * self.matmul_parameters(vocabulary_size) + attention
