"""The built-in objectives, one module each, and their registry. Nothing imports torch before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from tidewheel.parts import Chosen, Kind
from tidewheel.train.objective import Objective
from tidewheel.train.objectives.cispo import CISPO as CISPO
from tidewheel.train.objectives.cpo import CPO as CPO
from tidewheel.train.objectives.dapo import DAPO as DAPO
from tidewheel.train.objectives.distillation import Distillation as Distillation
from tidewheel.train.objectives.dpo import DPO as DPO
from tidewheel.train.objectives.dr_grpo import DrGRPO as DrGRPO
from tidewheel.train.objectives.grpo import GRPO as GRPO
from tidewheel.train.objectives.gspo import GSPO as GSPO
from tidewheel.train.objectives.kto import KTO as KTO
from tidewheel.train.objectives.next_token import NextToken as NextToken
from tidewheel.train.objectives.on_policy_distillation import OnPolicyDistillation as OnPolicyDistillation
from tidewheel.train.objectives.orpo import ORPO as ORPO
from tidewheel.train.objectives.ppo import PPO as PPO
from tidewheel.train.objectives.reinforce import Reinforce as Reinforce
from tidewheel.train.objectives.reward_model import RewardModel as RewardModel
from tidewheel.train.objectives.rloo import RLOO as RLOO
from tidewheel.train.objectives.sapo import SAPO as SAPO
from tidewheel.train.objectives.simpo import SimPO as SimPO

KIND = Kind("objective", Objective, __name__, "tidewheel.objectives")
DEFAULT = "next_token"
ChosenObjective = Annotated[Objective, Chosen(KIND, DEFAULT)]


def where(condition: Callable[[type[Objective]], bool]) -> str:
    """Return the names of the built-in objectives that meet a condition, for messages."""
    return ", ".join(name for name in KIND.built_in() if condition(KIND.find(name)))
