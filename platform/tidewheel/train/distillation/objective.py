"""The base of objectives that compare with a teacher. It does not import torch before training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidewheel.train.objective import Objective


class TeacherObjective(Objective):
    """Base of objectives with a teacher, which runs beside the student or whose tokens are in `data.teacher`."""

    temperature: float = Field(default=1.0, gt=0)
    """T: logits of both are divided by it. With `data.teacher`, the one that the tokens were made with."""
    teacher: str = ""
    """The teacher, frozen on the same workers: a run (its newest complete checkpoint) or
    RUN/checkpoints/step_00000100. Empty: its tokens are in `data.teacher`."""
    teacher_weights: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights of `teacher` in memory. bf16 halves them; its products are then in bf16 too."""

    @property
    def needs_teacher(self) -> bool:
        return True
