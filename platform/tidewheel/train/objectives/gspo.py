"""Group sequence policy optimisation: one ratio for each answer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidewheel.train.policy.objective import SURROGATE, PolicyObjective
from tidewheel.versions import Version


class GSPO(PolicyObjective):
    """GSPO (https://arxiv.org/abs/2507.18071): the ratio is the geometric mean over the answer, and is clipped at 3e-4
    and 4e-4, as in section 5.1."""

    VERSION = Version("objective_gspo", uses=(SURROGATE,))

    ratio: Literal["token", "sequence", "product"] = "sequence"
    epsilon: float = Field(default=3e-4, gt=0)
    epsilon_high: float = Field(default=4e-4, gt=0)
