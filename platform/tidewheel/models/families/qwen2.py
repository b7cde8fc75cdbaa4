"""Qwen 2 and 2.5: Llama's block with biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tidewheel.errors import ConfigError
from tidewheel.models.family import Model
from tidewheel.models.gated import Gated
from tidewheel.models.huggingface_settings import Settings, common_settings
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

_QWEN25 = {"rope_theta": 1e6, "norm_epsilon": 1e-6, "max_sequence_length": 32768}
_LONG = {**_QWEN25, "max_sequence_length": 131072}
_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 192, "tie_embeddings": True},
    # https://arxiv.org/abs/2412.15115, table 1, and config.json of https://huggingface.co/Qwen/Qwen2.5-0.5B and so on
    "qwen2.5_0.5b": {**_QWEN25, "dim": 896, "num_layers": 24, "num_heads": 14, "num_kv_heads": 2, "ffn_dim": 4864,
                     "tie_embeddings": True},
    "qwen2.5_1.5b": {**_LONG, "dim": 1536, "num_layers": 28, "num_heads": 12, "num_kv_heads": 2, "ffn_dim": 8960,
                     "tie_embeddings": True},
    "qwen2.5_3b": {**_QWEN25, "dim": 2048, "num_layers": 36, "num_heads": 16, "num_kv_heads": 2, "ffn_dim": 11008,
                   "tie_embeddings": True},
    "qwen2.5_7b": {**_LONG, "dim": 3584, "num_layers": 28, "num_heads": 28, "num_kv_heads": 4, "ffn_dim": 18944},
    "qwen2.5_14b": {**_LONG, "dim": 5120, "num_layers": 48, "num_heads": 40, "num_kv_heads": 8, "ffn_dim": 13824,
                    "norm_epsilon": 1e-5},
    "qwen2.5_32b": {**_LONG, "dim": 5120, "num_layers": 64, "num_heads": 40, "num_kv_heads": 8, "ffn_dim": 27648,
                    "norm_epsilon": 1e-5},
    "qwen2.5_72b": {**_LONG, "dim": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8, "ffn_dim": 29568,
                    "norm_epsilon": 1e-5},
}


class Qwen2(Gated):
    """A Qwen-2 style decoder (https://arxiv.org/abs/2407.10671): Llama's with biases of queries, keys and values."""

    VERSION: ClassVar[Version] = Version("model_qwen2", uses=(Model.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("qwen2",)

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Attention, Block, SwiGLU

        return Block(self, Attention(self, bias=True), SwiGLU(self.dim, self.ffn_width, fused=self.fused_products))

    def extra_parameters(self) -> tuple[int, int]:
        return (self.num_heads + 2 * self.kv_heads) * self.head_width, 0

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Any]:
        if self.head_width * self.num_heads != self.dim:
            raise ConfigError("transformers' model has heads of dim / num_heads", where="model.head_dim",
                              fix="export models without head_dim")
        values = common_settings(self, "Qwen2ForCausalLM", "qwen2", vocabulary_size, eos, dtype)
        del values["attention_bias"]  # queries, keys and values always have biases there
        return {**values, "use_sliding_window": False}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Self:
        settings = Settings(values, where)
        settings.must_be(hidden_act="silu", use_sliding_window=False)
        settings.get("sliding_window", None)  # without use_sliding_window it is not used
        settings.get("layer_types", None)
        return settings.build(cls, {**settings.common(), **settings.rope()})
