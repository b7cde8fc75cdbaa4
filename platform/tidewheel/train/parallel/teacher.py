"""Build and load the live teacher of a distillation, in the layout of its student."""

from __future__ import annotations

import torch

from tidewheel.shards.manifest import Manifest
from tidewheel.train import checks
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import building
from tidewheel.train.parallel.before import Teacher
from tidewheel.train.parallel.model import ParallelModel
from tidewheel.train.runtime import Loaded, Runtime
from tidewheel.train.teacher_config import live_teacher, teacher_config


def build(config: TrainConfig, student: ParallelModel, manifest: Manifest, runtime: Runtime) -> Teacher | None:
    """Return the teacher with uninitialised parameters; None if the run has no live teacher. All ranks call it.

    Args:
        config: of the run.
        student: this rank's part of the student.
        manifest: of the training set.
        runtime: this rank, the world size and the device.

    Raises:
        CheckpointError: there is no checkpoint of a decoder at `objective.teacher`.
        ConfigError: it has another vocabulary or tokenizer, or does not fit the layout.
    """
    uri = live_teacher(config)
    if not uri:
        return None
    described = runtime.checkpoints.describe(uri)
    checks.teacher(config, described, manifest)
    settings = teacher_config(config, described.model)
    in_bf16 = settings.precision == "bf16" and config.precision != "bf16"
    return Teacher(building.build(settings, described.vocabulary_size, runtime, student.mesh), in_bf16=in_bf16)


@torch.no_grad()
def load(teacher: Teacher, uri: str, runtime: Runtime) -> Loaded:
    """Set the teacher's values from a checkpoint, and return which one it was. All ranks call it together.

    Args:
        teacher: this rank's part of the teacher.
        uri: of the checkpoint, or of its run.
        runtime: reads checkpoints.
    """
    model = teacher.model
    values = {name: parameter.detach() for name, parameter in model.frozen_parameters()}
    loaded = runtime.checkpoints.load_from(uri, {"model": {**values, **dict(model.named_buffers())}})
    model.refresh()
    return loaded
