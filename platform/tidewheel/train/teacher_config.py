"""The configuration of a live teacher. It does not import torch, so a plan can count the teacher."""

from __future__ import annotations

from typing import Any

from tidewheel.models import families
from tidewheel.train import objectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.distillation.objective import TeacherObjective
from tidewheel.train.memory.config import MemoryConfig


def live_teacher(config: TrainConfig) -> str:
    """Return the URI of a run's live teacher; "" if it has none."""
    return config.objective.teacher if isinstance(config.objective, TeacherObjective) else ""


def teacher_config(config: TrainConfig, model: dict[str, Any]) -> TrainConfig:
    """Return the configuration that builds a run's frozen teacher, in the layout of the student.

    Args:
        config: of the run, whose objective has a teacher.
        model: settings of the teacher, `Model.shape()`.
    """
    assert isinstance(config.objective, TeacherObjective)
    weights = config.objective.teacher_weights
    built = families.of_shape(model).model_copy(update={
        "attention": config.model.attention, "flash_attention": config.model.flash_attention})
    return config.model_copy(update={
        "model": built, "objective": objectives.KIND.build(objectives.DEFAULT), "adapter": None, "parameters": weights,
        "memory": MemoryConfig(), "precision": "bf16" if weights == "bf16" else config.precision})
