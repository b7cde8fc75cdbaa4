"""Bytes of parameters, gradients and optimizer state per parameter: by optimizer, and by the models of textbooks."""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.parts import name_of
from tidewheel.plan.layout import GRADIENT_BYTES, Job
from tidewheel.train import optimizers

MASTER_BYTES = 4


@dataclass(frozen=True)
class ByteModel:
    """Bytes of a parameter, whatever the layout."""

    what: str
    parameter: float
    gradient: float
    master: float
    """fp32 master weights."""
    state: float
    """Moments of the optimizer."""
    note: str = ""

    @property
    def total(self) -> float:
        """All bytes of a parameter."""
        return self.parameter + self.gradient + self.master + self.state


PUBLISHED = (
    ByteModel("ZeRO's: 16-bit gradients", 2, 2, 4, 8, "2+2+12, arXiv:1910.02054, section 3.1"),
    ByteModel("bf16 weights without masters", 2, 4, 0, 8,
              "2+4+4+4; updates below half a unit of rounding are lost"))
"""Models of published tables that a run of ours does not have, with AdamW."""


def byte_models(job: Job) -> list[ByteModel]:
    """Return the models of the configured optimizer and of all built-in ones, then `PUBLISHED`.

    Every optimizer has its default settings, but `optimizer` of the configuration its own.

    Args:
        job: the run, whose type of parameters and whose matrices count.
    """
    config = job.config.optimizer
    own = name_of(type(config))
    masters = MASTER_BYTES if job.weight_bytes == 2 else 0
    models = []
    for name in dict.fromkeys((own, *optimizers.KIND.built_in())):
        part = config if name == own else optimizers.KIND.build(name, {})
        models.append(ByteModel(name, job.weight_bytes, GRADIENT_BYTES, masters, _state(job, part),
                                "this run" if name == own else part.STATE_NOTE))
        if part.LEANER:
            leaner = type(part).model_validate(part.LEANER)
            changed = ", ".join(f"{setting} {value:g}" for setting, value in part.LEANER.items())
            models.append(ByteModel(f"{name}, {changed}", job.weight_bytes, GRADIENT_BYTES, masters,
                                    _state(job, leaner)))
    return [*models, *PUBLISHED]


def _state(job: Job, part: optimizers.Optimizer) -> float:
    return part.state_bytes(job.parameters, job.costs.matrices + job.costs.cut) / job.parameters
