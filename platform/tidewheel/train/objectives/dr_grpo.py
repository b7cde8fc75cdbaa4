"""Dr. GRPO: GRPO without the division by the length of each answer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidewheel.train.policy.objective import SURROGATE, PolicyObjective
from tidewheel.versions import Version


class DrGRPO(PolicyObjective):
    """Dr. GRPO (https://arxiv.org/abs/2503.20783): the sum over tokens, divided by a constant, so that long wrong
    answers are not punished less. Its advantages are not divided by the group's deviation: `rollouts.advantage:
    group_mean`."""

    VERSION = Version("objective_dr_grpo", uses=(SURROGATE,))

    average: Literal["sequences", "tokens", "constant"] = "constant"
    answer_tokens: int = Field(default=256, ge=0)
