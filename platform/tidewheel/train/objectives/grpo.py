"""Group-relative policy optimisation: PPO's clipped loss without a value model."""

from __future__ import annotations

from tidewheel.train.policy.objective import SURROGATE, PolicyObjective
from tidewheel.versions import Version


class GRPO(PolicyObjective):
    """GRPO (https://arxiv.org/abs/2402.03300): the mean of the clipped loss over tokens, then over answers."""

    VERSION = Version("objective_grpo", uses=(SURROGATE,))
