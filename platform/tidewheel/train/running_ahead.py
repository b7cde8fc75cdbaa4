"""Decide when the host may start a step before it has read the result of the step before.

A step's loss, norm and verdict are on the device, and so is the decision to withhold a bad update. So the host can
enqueue step k + 1 while the device still computes step k, and the device never waits for the host. Everything that
needs the state after step k, or changes what comes next, needs its result first: a request of rank 0, a save, an
evaluation, a sample, a profile, the last step.

All ranks must decide alike, so rank 0 announces requests one step before: `WAIT` in the report of step k says that it
expects one after step k + 1. That step is then waited for, and its own report holds the requests, as if the host never
ran ahead. A request that comes too late to be announced is made one step later.

A step that was started behind one that the run goes back from is dropped: the checkpoint replaces all it has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidewheel.train.evaluating import Evaluating
from tidewheel.train.saving import Saving
from tidewheel.train.step import WAIT, StartedStep, StepResult
from tidewheel.train.training import Training


@dataclass(frozen=True)
class Pending:
    """A step that was started and is not recorded yet."""

    step: int
    started: StartedStep
    digest: Callable[[], str | None]
    """Waits for the digest of its sequences, on rank 0."""
    learning_rate: float


class RunningAhead:
    """The decisions of one worker; all ranks make the same.

    Args:
        training: this worker's share of the run.
        saving: knows the requests of rank 0.
        evaluating: knows the steps to evaluate.
    """

    def __init__(self, training: Training, saving: Saving, evaluating: Evaluating) -> None:
        self._training, self._saving, self._evaluating = training, saving, evaluating
        setting = training.config.run_ahead
        usual = training.device.type == "cuda" or training.config.stage_schedule is not None
        on = usual if setting == "auto" else setting
        self.on = on and training.loss_scale is None  # the scale of a step follows from the step before
        """Whether the host ever runs ahead."""
        # a stage schedule's result depends on which steps are waited for, so a resumed run waits no more than others
        self._announced = training.config.stage_schedule is None
        """On rank 0: whether the step to be asked about is waited for."""
        self._waits = self._announced  # the same as all ranks know it, of the step behind the last result

    def ask(self, step: int) -> int:
        """Return this rank's part of `StepResult.asked`; called once in each step."""
        if not self.on or not self._training.leads:
            return self._saving.ask(step)
        asked = self._saving.ask(step) if self._announced else 0
        self._announced = self._saving.expects(step + 1)
        return asked | WAIT * self._announced

    def waits_for(self, step: int) -> bool:
        """Return whether the result of `step` is needed before the next step starts.

        Call it when the results of all earlier steps are known.
        """
        config = self._training.config
        profiled = not {step, step + 1}.isdisjoint(config.profile.steps)
        return (not self.on or self._waits or profiled or step >= config.steps or config.rollouts is not None
                or (self._training.outer is not None and self._training.outer.is_due(step))
                or self._evaluating.is_due(step) or self._evaluating.sample_is_due(step)
                or self._evaluating.tasks.is_due(step))

    def ended(self, result: StepResult) -> None:
        """Note the result of the last step."""
        self._waits = bool(result.asked & WAIT)

    def restart(self) -> None:
        """Forget what was announced: the run went back."""
        self._announced = self._waits = True
