"""REINFORCE leave-one-out, with a ratio for rollouts of an earlier policy."""

from __future__ import annotations

from typing import Literal

from tidewheel.train.policy.objective import SURROGATE, PolicyObjective
from tidewheel.versions import Version


class RLOO(PolicyObjective):
    """RLOO (https://arxiv.org/abs/2402.14740): an answer is one action, whose ratio is the product over its tokens. Its
    advantages are rewards minus the mean of the others: `rollouts.advantage: leave_one_out`."""

    VERSION = Version("objective_rloo", uses=(SURROGATE,))

    ratio: Literal["token", "sequence", "product"] = "product"
