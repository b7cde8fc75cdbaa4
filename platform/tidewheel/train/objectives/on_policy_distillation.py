"""On-policy distillation: the student answers, and learns the teacher's distribution on its own answers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from tidewheel.shards.manifest import ROLLOUTS
from tidewheel.train.objective import Dimension
from tidewheel.train.objectives.distillation import Distillation
from tidewheel.versions import Version


class OnPolicyDistillation(Distillation):
    """KL(student || teacher) over the whole vocabulary on tokens that the student sampled, in nats per token.

    It is GKD (https://arxiv.org/abs/2306.13649) with the student's answers alone. The teacher is a model that runs
    beside the student (`teacher`). Rewards are only reported: no advantage enters the loss.
    """

    VERSION = Version("objective_on_policy_distillation")
    READS = ROLLOUTS
    WORKS_WITH: ClassVar[tuple[Dimension, ...]] = ("tensor", "pipeline")

    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon"] = "reverse_kl"
    weight: float = Field(default=1.0, gt=0, le=1)
