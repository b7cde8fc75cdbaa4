"""OLMo 2: Llama's block with norms after attention and feed-forward, and over all query and all key heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field

from tidewheel.errors import ConfigError
from tidewheel.models.family import Cut, Model
from tidewheel.models.gated import Gated
from tidewheel.models.huggingface_settings import Settings, common_settings
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

_COMMON = {"rope_theta": 5e5, "norm_epsilon": 1e-6, "max_sequence_length": 4096}
_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 192, "tie_embeddings": True},
    # https://arxiv.org/abs/2501.00656, table 1, and config.json of https://huggingface.co/allenai/OLMo-2-1124-7B,
    # OLMo-2-1124-13B, OLMo-2-0325-32B and OLMo-2-0425-1B
    "olmo2_1b": {**_COMMON, "dim": 2048, "num_layers": 16, "num_heads": 16, "ffn_dim": 8192},
    "olmo2_7b": {**_COMMON, "dim": 4096, "num_layers": 32, "num_heads": 32, "ffn_dim": 11008},
    "olmo2_13b": {**_COMMON, "dim": 5120, "num_layers": 40, "num_heads": 40, "ffn_dim": 13824},
    "olmo2_32b": {**_COMMON, "dim": 5120, "num_layers": 64, "num_heads": 40, "num_kv_heads": 8, "ffn_dim": 27648},
}


class Olmo2(Gated):
    """An OLMo-2 style decoder (https://arxiv.org/abs/2501.00656): norms follow attention and feed-forward."""

    VERSION: ClassVar[Version] = Version("model_olmo2", uses=(Model.VERSION,))
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = _PRESETS
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("olmo2",)

    rope_theta: float = Field(default=5e5, gt=0)
    """Base of the RoPE frequencies."""
    norm_epsilon: float = Field(default=1e-6, gt=0)
    """Added to the mean square in RMSNorm."""
    init_std: float | None = Field(default=0.02, gt=0)
    """Standard deviation of initial weights. That of projections into the residual stream is divided by
    sqrt(2 num_layers)."""

    def block(self, layer: int) -> nn.Module:
        from tidewheel.models.blocks import Attention, Block, SwiGLU

        return Block(self, Attention(self, qk_norm="width"), SwiGLU(
            self.dim, self.ffn_width, fused=self.fused_products), pre_norm=False, post_norm=True)

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        plan = {name: cut for name, cut in super().tensor_parallel(layer).items() if cut != "positions"}
        return {**plan, "attention_post_norm": "added", "ffn_post_norm": "added", "attention.q_norm": "width",
                "attention.k_norm": "width"}

    def extra_parameters(self) -> tuple[int, int]:
        return (self.num_heads + self.kv_heads) * self.head_width, 0  # of the norms over all heads

    @property
    def normed_heads(self) -> int:
        return self.num_heads + self.kv_heads

    def hugging_face_names(self) -> dict[str, str]:
        return {**super().hugging_face_names(), "attention_post_norm": "post_attention_layernorm",
                "ffn_post_norm": "post_feedforward_layernorm"}

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Any]:
        if self.head_width * self.num_heads != self.dim:
            raise ConfigError("transformers' model has heads of dim / num_heads", where="model.head_dim",
                              fix="export models without head_dim")
        return common_settings(self, "Olmo2ForCausalLM", "olmo2", vocabulary_size, eos, dtype)

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], where: str) -> Self:
        settings = Settings(values, where)
        settings.must_be(hidden_act="silu", attention_bias=False)
        return settings.build(cls, {**settings.common(), **settings.rope()})
