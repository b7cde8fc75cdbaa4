"""`tw.sweep`: trainings of several sizes and lengths, and the scaling law of their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidewheel.config import Setting
from tidewheel.errors import ConfigError
from tidewheel.workflow.steps import WorkflowStep
from tidewheel.workflow.training import Settings, Train

if TYPE_CHECKING:
    from tidewheel.workflow.pipeline import Pipeline


@dataclass(frozen=True)
class ScalingLaw:
    """Fit L(N, D) = E + A / N^alpha + B / D^beta to the validation losses of trainings.

    N is a run's number of parameters, D its training tokens. The output has law.json, for `tidewheel plan budget
    --law`, and report.html. Each training must have decayed its learning rate by its end: a loss in the middle of a
    longer run is higher than that of a run of this length (arXiv:2203.15556, section 3.1).

    Args:
        name: name of the step, and of the law.
        runs: trainings with a validation set, at least six, of at least three sizes and three lengths.
        confidence: of the intervals.
        resamples: number of bootstrap samples for the intervals.
        seed: of the samples.
    """

    name: str
    runs: Sequence[Train]
    confidence: float = 0.9
    resamples: int = 1000
    seed: int = 0

    def inputs(self) -> dict[str, WorkflowStep]:
        """Return the trainings, by role."""
        return {f"run.{index}": run for index, run in enumerate(self.runs)}

    def entry(self) -> dict[str, Setting]:
        """Return the step as JSON values; see `steps`.

        Raises:
            ConfigError: the confidence is not between 0 and 1, or there are too few runs or samples.
        """
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence {self.confidence:g}", where=f"ScalingLaw({self.name!r})",
                              fix="give a share between 0 and 1, such as 0.9")
        if self.resamples < 100:
            raise ConfigError(f"resamples {self.resamples}", where=f"ScalingLaw({self.name!r})",
                              fix="give 100 or more; 1,000 take a second")
        return {"kind": "scaling_law", "name": self.name, "config": {
            "confidence": self.confidence, "resamples": self.resamples, "seed": self.seed}}


def sweep(name: str, config: str | Settings, data: Pipeline | str | Mapping[str, str | Pipeline], *,
          sizes: Sequence[Settings], steps: Sequence[int], confidence: float = 0.9, resamples: int = 1000,
          **settings: Setting) -> ScalingLaw:
    """Return the scaling law of a grid of trainings, one for each size and length.

        law = tw.sweep("law", "jobs/configs/small.yaml", corpus, steps=[500, 1000, 2000],
                       sizes=[{"model": {"dim": 128}}, {"model": {"dim": 192}}, {"model": {"dim": 256}}])
        tw.Workflow("scaling", law).run("out")

    Args:
        name: name of the law. The trainings are called NAME-SIZE-STEPS, SIZE being the position in `sizes`.
        config: path of a YAML file, or settings, that all trainings share.
        data: what they read, as `Train` takes it. It needs a validation set.
        sizes: settings of each size, by group: its model, and what depends on it, such as the learning rate.
        steps: number of steps of each length.
        confidence: of the intervals.
        resamples: number of bootstrap samples for the intervals.
        settings: further arguments of `Train`.

    Raises:
        ConfigError: a setting is unknown or wrong.
    """
    runs = []
    for index, size in enumerate(sizes):
        for count in steps:
            groups: dict[str, Any] = {**settings, **size, "run": {"id": f"{name}-{index}-{count}"}, "steps": count}
            runs.append(Train(config, data, **groups))
    return ScalingLaw(name, tuple(runs), confidence, resamples)
