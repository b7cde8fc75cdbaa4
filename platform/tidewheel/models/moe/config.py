"""Settings of model families with a mixture of experts. Nothing here imports torch."""

from __future__ import annotations

from typing import ClassVar, Literal

import pydantic
from pydantic import Field

from tidewheel.models.costs import FeedForwardShape
from tidewheel.models.family import Model
from tidewheel.versions import Version

ROUTING = Version("expert_routing")
"""Version of the router, the combination of experts and their balancing."""


class MixtureOfExperts(Model):
    """Settings of a mixture of experts; `moe.family.MixtureFamily` is the base of families.

    Each token goes to `experts_per_token` of `num_experts` gated feed-forwards; no token is dropped.
    """

    VERSION: ClassVar[Version] = Version("mixture_of_experts", uses=(Model.VERSION, ROUTING))
    FEED_FORWARD: ClassVar[FeedForwardShape] = FeedForwardShape(inputs=2, kept=4, kept_compiled=3)
    RESIDUAL_OUTPUTS: ClassVar[tuple[str, ...]] = (
        "attention.wo.weight", "ffn.w2.weight", "ffn.shared.w2.weight", "ffn.experts.w2")
    SCORES: ClassVar[Literal["softmax", "chosen_softmax", "sigmoid"]] = "softmax"
    """How the family turns router logits into scores. softmax: over all experts. chosen_softmax: over the chosen ones,
    which are those of the highest logits. sigmoid: each by itself."""
    SCORE_EPSILON: ClassVar[float] = 0.0
    """Added to the sum by which weights are divided."""
    EXPERT_BIAS: ClassVar[bool] = False
    """Whether experts and router have biases."""
    ACTIVATION: ClassVar[Literal["silu", "clamped"]] = "silu"
    """Activation of the experts, see `moe.experts.Experts`."""

    num_experts: int = Field(default=8, ge=1)
    """Routed experts of a layer."""
    experts_per_token: int = Field(default=2, ge=1)
    """Routed experts that compute a token."""
    expert_ffn_dim: int | None = Field(default=None, ge=8)
    """Inner width of an expert; default: `ffn_dim`."""
    shared_experts: int = Field(default=0, ge=0)
    """Experts that compute every token; they are one feed-forward of shared_experts x expert_ffn_dim."""
    first_dense_layers: int = Field(default=0, ge=0)
    """Number of first layers with a dense feed-forward of width `ffn_dim`."""
    normalise_weights: bool = True
    """Divide the weights of a token's experts by their sum."""
    weight_scale: float = Field(default=1.0, gt=0)
    """Factor of the weights of a token's experts."""
    expert_groups: int = Field(default=1, ge=1)
    """Groups of neighbouring experts, of which a token uses `groups_per_token` (DeepSeek-V3,
    https://arxiv.org/abs/2412.19437 section 2.1.2)."""
    groups_per_token: int = Field(default=1, ge=1)
    """Groups from which the experts of a token come: those with the highest sum of their two best scores."""
    routing: Literal["token_choice", "expert_choice"] = "token_choice"
    """token_choice: each token chooses its experts. expert_choice: each expert chooses the same number of tokens of a
    micro-batch (https://arxiv.org/abs/2202.09368). That choice depends on later tokens, so a model that generates text
    token by token cannot repeat it: use it for encoders, or knowingly."""
    balancing: Literal["bias", "auxiliary", "none"] = "bias"
    """How experts get equal loads. bias: a bias per expert, used only to choose, moves against the load after each step
    (https://arxiv.org/abs/2408.15664). auxiliary: an auxiliary loss. none: not at all."""
    balancing_rate: float = Field(default=1e-3, gt=0)
    """Step by which the bias moves; 1e-3 in https://arxiv.org/abs/2408.15664 section 4.3."""
    auxiliary_loss: float = Field(default=0.01, ge=0)
    """Weight of the auxiliary loss, if it balances; 0.01 in https://arxiv.org/abs/2101.03961 section 2.2."""
    router_z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log-normaliser of the router's logits; 1e-3 in https://arxiv.org/abs/2202.08906."""

    @pydantic.model_validator(mode="after")
    def _routable(self) -> MixtureOfExperts:
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is more than num_experts {self.num_experts}")
        if self.num_experts % self.expert_groups:
            raise ValueError(f"num_experts {self.num_experts} is not a multiple of expert_groups {self.expert_groups}")
        if self.groups_per_token > self.expert_groups:
            raise ValueError(f"groups_per_token {self.groups_per_token} is more than expert_groups "
                             f"{self.expert_groups}")
        if self.first_dense_layers >= self.num_layers:
            raise ValueError(f"first_dense_layers {self.first_dense_layers} leaves no layer with experts; num_layers "
                             f"is {self.num_layers}")
        in_reach = self.num_experts // self.expert_groups * self.groups_per_token
        if self.experts_per_token > in_reach:
            raise ValueError(f"experts_per_token {self.experts_per_token} is more than the {in_reach} experts of "
                             f"{self.groups_per_token} groups")
        if self.expert_groups > 1 and self.num_experts // self.expert_groups < 2:
            raise ValueError("a group needs 2 experts: it is scored by the sum of its two best")
        if self.routing == "expert_choice" and self.expert_groups > 1:
            raise ValueError("expert_groups limit the choice of tokens, but routing is expert_choice")
        return self

    @property
    def expert_width(self) -> int:
        """Return the inner width of an expert."""
        return self.expert_ffn_dim or self.ffn_width

    @property
    def moves_bias(self) -> bool:
        """Return whether a selection bias balances the load. Experts that choose have equal loads without it."""
        return self.balancing == "bias" and self.routing == "token_choice"

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts in the place of a dense feed-forward."""
        return layer >= self.first_dense_layers
