"""The shape of a decoder, as configuration. Nothing here imports torch."""

from __future__ import annotations

import difflib
from typing import Any, Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config

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

PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 192, "tie_embeddings": True},
    # depth and width of GPT-3's smallest model (https://arxiv.org/abs/2005.14165, table 2.1), Llama 3's parts
    "125m": _125M, "llama3_125m": _125M,
    # Llama-3.2-1B's shape with an output matrix of its own and no long-context scaling: for training from scratch
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


class RopeScaling(Config):
    """Llama 3.1's stretching of RoPE to longer sequences (https://arxiv.org/abs/2407.21783); see `rope.frequencies`."""

    factor: float = Field(default=8.0, ge=1)
    """Slow frequencies are divided by this."""
    low_frequency_factor: float = Field(default=1.0, gt=0)
    """Frequencies with fewer turns than this in `original_length` positions are divided by `factor`."""
    high_frequency_factor: float = Field(default=4.0, gt=0)
    """Frequencies with more turns than this in `original_length` positions stay; between the two, a blend."""
    original_length: int = Field(default=8192, ge=2)
    """Sequence length before the stretching."""

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(f"low_frequency_factor {self.low_frequency_factor:g} is not below "
                             f"high_frequency_factor {self.high_frequency_factor:g}")
        return self


class LossConfig(Config):
    """Next-token cross entropy."""

    chunk_tokens: int | None = Field(default=None, ge=0)
    """Logits exist for so many tokens at a time; 0: for a whole micro-batch at once. Default: whole while they are
    small, else in chunks (`loss.chunk_rows`)."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the square of each token's log-normaliser in what is minimised, 1e-4 in PaLM
    (https://arxiv.org/abs/2204.02311 section 5); the loss that is reported stays the cross entropy alone."""


class ModelConfig(Config):
    """A Llama-3 / Qwen-3 style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    preset: str = Field(default="", exclude=True)
    """Start from a named shape (debug, 125m, 1b, 8b, 70b, llama3_8b, qwen3_0.6b, ...); other keys change it."""
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
    rope_scaling: RopeScaling | None = None
    """Stretch RoPE to longer sequences as Llama 3.1 does."""
    norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    qk_norm: bool = True
    """RMSNorm on each query and key head (Qwen 3): keeps attention logits bounded at high learning rates."""
    tie_embeddings: bool = False
    """One matrix for the embedding and the output."""
    init_std: float | None = Field(default=None, gt=0)
    """Standard deviation of initial weights, default 1 / sqrt(dim); projections into the residual stream get it
    / sqrt(2 num_layers)."""
    init_from: str = ""
    """Start with the weights of a checkpoint instead of random ones: the URI of a run (its newest), of RUN/checkpoints/
    step_00000100, or of what `tidewheel checkpoint import` wrote."""
    attention: Literal["auto", "masked", "flex", "varlen"] = "auto"
    """Attention kernel: a dense mask, FlexAttention with a block mask, or flash attention over documents of varying
    length (16-bit, CUDA); auto: the best for the device. It changes speed and rounding only."""

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

    def shape(self) -> dict[str, Any]:
        """The settings that decide what is computed: not the kernel, nor where the first weights come from."""
        return self.model_dump(mode="json", exclude={"attention", "init_from"})

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
