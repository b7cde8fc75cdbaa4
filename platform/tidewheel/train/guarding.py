"""Act on a guard's verdict about a step: record an event, end the run, or roll back."""

from __future__ import annotations

from tidewheel.errors import ConfigError
from tidewheel.train.callback import Callbacks
from tidewheel.train.guards import policy
from tidewheel.train.guards.policy import Guard, Verdict
from tidewheel.train.metrics.reporter import Reporter
from tidewheel.train.resuming import Resuming
from tidewheel.train.step import StepResult
from tidewheel.train.training import Training


class Guarding:
    """Acts on the verdicts of one worker; all ranks make the same calls.

    Args:
        training: this worker's share of the run.
        guard: judges the steps.
        resuming: continues from the checkpoint that the run goes back to.
        metrics: drops the steps that are undone.
        callbacks: are called for rollbacks.
    """

    def __init__(self, training: Training, guard: Guard, resuming: Resuming, metrics: Reporter,
                 callbacks: Callbacks) -> None:
        self._training, self._guard, self._resuming = training, guard, resuming
        self._metrics, self._callbacks = metrics, callbacks

    def check(self, step: int, result: StepResult, digest: str | None) -> None:
        """Record the guard's verdict, if it has one.

        Args:
            step: counts from 1.
            result: what the step measured.
            digest: digest of the global batch's sequences, on rank 0.

        Raises:
            ConfigError: the verdict ends the run.
        """
        training, verdict = self._training, result.verdict
        if verdict.reason == "overflow" and training.loss_scale is not None:
            training.event("overflow", step=step, loss_scale=training.loss_scale.scale)
        elif verdict.reason:
            training.event("guard", **policy.event(verdict, step, training.positions.of(step), digest, result.loss,
                                                   result.gradient_norm))
            self._guard.check(verdict, step, training.config.run_uri)

    def roll_back(self, step: int, verdict: Verdict) -> None:
        """Go back to the newest checkpoint, and pass over the data that led to this step.

        Raises:
            ConfigError: there were too many rollbacks, or there is no checkpoint.
        """
        training, config, windows = self._training, self._training.config, self._training.positions.windows
        self._guard.check_rollbacks(len(windows), verdict, step, config.run_uri)
        training.watch.mark(step, "rollback")
        extra = training.runtime.checkpoints.load_saved(training.state())
        if extra is None:
            raise ConfigError(f"{verdict.reason} at step {step}, and there is no checkpoint to go back "
                              "to", where=config.run_uri,
                              fix="set checkpoint.every_steps, or guards.non_finite and guards.spike to skip")
        back_to = int(extra["step"])
        window = policy.window(training.positions, step, back_to, config.guards.pass_over)
        if training.leads:
            training.record.pass_over(step, back_to, window)
        training.pass_over((*windows, window))
        training.rates.lower_after((*training.rates.rollbacks, back_to))
        self._resuming.continue_from(extra)
        self._metrics.restart(training.progress.step)
        training.progress.recorded = max(training.progress.recorded, step)
        self._callbacks.call("on_rollback", step, back_to)
        training.timeline.spent("restart")
        training.event("rollback", step=step, back_to=back_to, position=window[0], count=window[1] - window[0],
                       reason=verdict.reason)
