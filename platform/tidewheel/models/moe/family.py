"""The base of model families whose blocks have experts in the place of a feed-forward.

Nothing here imports torch before a block is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidewheel.errors import ConfigError
from tidewheel.models.costs import LayerCosts
from tidewheel.models.family import Cut
from tidewheel.models.moe.config import MixtureOfExperts

if TYPE_CHECKING:
    from torch import nn


class MixtureFamily(MixtureOfExperts):
    """Base of model families with a mixture of experts: the feed-forward of each layer, its cuts and its costs."""

    def feed_forward(self, layer: int) -> nn.Module:
        """Return the feed-forward of a layer with uninitialised parameters: experts, or a dense one."""
        from tidewheel.models.blocks import SwiGLU
        from tidewheel.models.moe.layer import MoE

        return MoE(self) if self.has_experts(layer) else SwiGLU(self.dim, self.ffn_width, fused=self.fused_products)

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        plan: dict[str, Cut] = {**super().tensor_parallel(layer)}
        if not self.has_experts(layer):
            return {**plan, "ffn.w1": "columns", "ffn.w3": "columns", "ffn.w2": "rows"}
        plan["ffn"] = "experts"
        if self.shared_experts:
            plan |= {"ffn.shared.w1": "columns", "ffn.shared.w3": "columns", "ffn.shared.w2": "rows"}
        return plan

    def layer_costs(self, layer: int) -> LayerCosts:
        per_width = (self.FEED_FORWARD.inputs + 1) * self.dim
        attention = self.attention_matrices
        cut, whole = self.extra_parameters()
        whole += 2 * self.dim
        if not self.has_experts(layer):
            matrices = attention + per_width * self.ffn_width
            return LayerCosts(matrices, matrices, cut=cut, whole=whole, inner=self.ffn_width)
        expert, router = per_width * self.expert_width, self.num_experts * self.dim
        biases = self.num_experts * (2 * self.expert_width + self.dim + 1) if self.EXPERT_BIAS else 0
        always = attention + expert * self.shared_experts
        return LayerCosts(
            always + expert * self.num_experts, always + expert * self.experts_per_token + router,
            experts=expert * self.num_experts, cut=cut, whole=whole + router + biases,
            inner=self.expert_width * (self.experts_per_token + self.shared_experts))

    @property
    def attention_matrices(self) -> int:
        """Return the number of parameters in the matrices of a layer's attention."""
        return 2 * self.dim * self.head_width * (self.num_heads + self.kv_heads)

    def hugging_face_names(self) -> dict[str, str]:
        return {"attention_norm": "input_layernorm", "attention.wq": "self_attn.q_proj",
                "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
                "attention.wo": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
                "attention.k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
                "ffn.w1": "mlp.gate_proj", "ffn.w3": "mlp.up_proj", "ffn.w2": "mlp.down_proj"}

    def check_exportable(self, **only: Any) -> None:
        """Check that settings have the only value that a format at Hugging Face can express.

        Args:
            only: that value by the setting's name.

        Raises:
            ConfigError: a setting has another value, or experts choose, which no format knows.
        """
        for name, value in {**only, "routing": "token_choice"}.items():
            if getattr(self, name) != value:
                raise ConfigError(f"{name} {getattr(self, name)!r} has no counterpart in transformers' model of this "
                                  "family", where=f"model.{name}", fix=f"export models with {name}: {value!r}, or "
                                  "train another family")
