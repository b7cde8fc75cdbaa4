"""GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases, and tied embeddings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pydantic
from pydantic import Field

from tidewheel.errors import ConfigError
from tidewheel.models.config import Rope
from tidewheel.models.conversion import Conversion, joined, transposed
from tidewheel.models.family import Cut, FeedForwardShape, Model
from tidewheel.models.huggingface_settings import Settings
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "max_sequence_length": 256},
    # https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf, table 2,
    # and config.json of https://huggingface.co/openai-community/gpt2, gpt2-medium, gpt2-large and gpt2-xl
    "gpt2_124m": {"dim": 768, "num_layers": 12, "num_heads": 12},
    "gpt2_355m": {"dim": 1024, "num_layers": 24, "num_heads": 16},
    "gpt2_774m": {"dim": 1280, "num_layers": 36, "num_heads": 20},
    "gpt2_1.5b": {"dim": 1600, "num_layers": 48, "num_heads": 25},
}
_NAMES = {"attention_norm": "ln_1", "attention.wo": "attn.c_proj", "ffn_norm": "ln_2", "ffn.w1": "mlp.c_fc",
          "ffn.w2": "mlp.c_proj"}
_GELU = "gelu_new"
"""Hugging Face's name of GELU's tanh approximation."""


class Gpt2(Model):
    """A GPT-2 style decoder: learned positions, LayerNorm, GELU and biases everywhere."""

    VERSION: ClassVar[Version] = Version("model_gpt2", uses=(Model.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    FEED_FORWARD: ClassVar[FeedForwardShape] = FeedForwardShape(inputs=1, kept=2, kept_compiled=1)
    RESIDUAL_OUTPUTS: ClassVar[tuple[str, ...]] = ("attention.wo.weight", "ffn.w2.weight")
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("gpt2",)
    HUGGING_FACE_PREFIX: ClassVar[str] = "transformer."
    HUGGING_FACE_LAYER: ClassVar[str] = "transformer.h.{}."
    HUGGING_FACE_ENDS: ClassVar[Mapping[str, str]] = {
        "embedding.weight": "transformer.wte.weight", "embedding.positions": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight", "norm.bias": "transformer.ln_f.bias",
        "output.weight": "lm_head.weight"}
    HUGGING_FACE_IGNORED: ClassVar[tuple[str, ...]] = (".attn.bias", ".attn.masked_bias")

    max_sequence_length: int = Field(default=1024, ge=2)
    """Number of learned positions; sequences may be shorter."""
    tie_embeddings: bool = True
    """Share one matrix between the embedding and the output."""
    init_std: float | None = Field(default=0.02, gt=0)
    """Standard deviation of initial weights. That of projections into the residual stream is divided by
    sqrt(2 num_layers)."""

    @pydantic.model_validator(mode="after")
    def _without_rope(self) -> Self:
        if self.rope_scaling is not None:
            raise ValueError("this family has learned positions; remove rope_scaling")
        return self

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Attention, Block, Mlp

        return Block(self, Attention(self, bias=True, output_bias=True), Mlp(self.dim, self.ffn_width))

    def norm(self, width: int | None = None) -> nn.Module:
        from tidewheel.models.blocks import LayerNorm

        return LayerNorm(width or self.dim, self.norm_epsilon)

    def rope(self, layer: int) -> Rope | None:
        return None

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        return {**super().tensor_parallel(layer), "ffn.w1": "columns", "ffn.w2": "rows"}

    def extra_parameters(self) -> tuple[int, int]:
        queries_keys_values = (self.num_heads + 2 * self.kv_heads) * self.head_width
        return queries_keys_values + self.ffn_width, 4 * self.dim  # biases of wo, w2 and two norms

    @property
    def learned_positions(self) -> int:
        return self.max_sequence_length

    @property
    def norm_parameters(self) -> int:
        return 2 * self.dim

    def hugging_face_names(self) -> dict[str, str]:
        return _NAMES

    def hugging_face_weights(self, layer: int, present: Collection[str] | None = None) -> Sequence[Conversion]:
        """Return the joined queries, keys and values, and transposed matrices: transformers' Conv1D is [in, out]."""
        queries, keys = self.num_heads * self.head_width, self.kv_heads * self.head_width
        parts = ("attention.wq", "attention.wk", "attention.wv")
        sizes = (queries, keys, keys)
        return [joined([f"{part}.weight" for part in parts], "attn.c_attn.weight", sizes, transpose=True),
                joined([f"{part}.bias" for part in parts], "attn.c_attn.bias", sizes),
                *(transposed(f"{name}.weight", f"{_NAMES[name]}.weight")
                  for name in ("attention.wo", "ffn.w1", "ffn.w2"))]

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Any]:
        if self.kv_heads != self.num_heads or self.head_width * self.num_heads != self.dim:
            raise ConfigError("transformers' model has as many key heads as query heads, and heads of dim / num_heads",
                              where="model", fix="export models without num_kv_heads and head_dim")
        return {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocabulary_size,
            "n_positions": self.max_sequence_length, "n_embd": self.dim, "n_layer": self.num_layers,
            "n_head": self.num_heads, "n_inner": self.ffn_width, "activation_function": _GELU,
            "layer_norm_epsilon": self.norm_epsilon, "tie_word_embeddings": self.tie_embeddings,
            "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "initializer_range": self.weight_std,
            "bos_token_id": None, "eos_token_id": eos, "torch_dtype": dtype}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Self:
        settings = Settings(values, where)
        settings.must_be(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
        if (activation := settings.get("activation_function", _GELU)) not in (_GELU, "gelu_pytorch_tanh"):
            settings.refuse(f"activation_function: {activation!r}")
        for name in ("reorder_and_upcast_attn", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
                     "summary_type", "summary_use_proj"):  # precision, and heads of other tasks
            settings.get(name, None)
        return settings.build(cls, {
            "dim": settings.get("n_embd"), "num_layers": settings.get("n_layer"), "num_heads": settings.get("n_head"),
            "ffn_dim": settings.get("n_inner", None), "max_sequence_length": settings.get("n_positions"),
            "norm_epsilon": settings.get("layer_norm_epsilon"),
            "tie_embeddings": settings.get("tie_word_embeddings", True)})
