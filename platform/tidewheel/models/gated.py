"""What families with a gated feed-forward share: its widths, cuts and costs, and the names at Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tidewheel.models.family import Cut, FeedForwardShape, Model


class Gated(Model):
    """Base of families of attention wq, wk, wv, wo and a feed-forward w2(activation(w1 x) * w3 x)."""

    FEED_FORWARD: ClassVar[FeedForwardShape] = FeedForwardShape(inputs=2, kept=4, kept_compiled=3)
    RESIDUAL_OUTPUTS: ClassVar[tuple[str, ...]] = ("attention.wo.weight", "ffn.w2.weight")

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        return {**super().tensor_parallel(layer), "ffn.w1": "columns", "ffn.w3": "columns", "ffn.w2": "rows"}

    @property
    def ffn_width(self) -> int:
        return self.ffn_dim or -(-8 * self.dim // 3 // 64) * 64

    def hugging_face_names(self) -> dict[str, str]:
        return {"attention_norm": "input_layernorm", "attention.wq": "self_attn.q_proj",
                "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
                "attention.wo": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
                "attention.k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
                "ffn.w1": "mlp.gate_proj", "ffn.w3": "mlp.up_proj", "ffn.w2": "mlp.down_proj"}
