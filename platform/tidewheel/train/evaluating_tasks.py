"""Evaluation tasks at the configured steps."""

from __future__ import annotations

from tidewheel.train.metrics.reporter import Reporter
from tidewheel.train.training import Training


class EvaluatingTasks:
    """Evaluates tasks for one worker; all ranks make the same calls.

    Args:
        training: this worker's share of the run.
        metrics: takes the results.
    """

    def __init__(self, training: Training, metrics: Reporter) -> None:
        self._training, self._metrics = training, metrics

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after this step, which is not the last."""
        config = self._training.config
        every = config.evaluation.tasks.every_steps
        return bool(every) and step % every == 0 and 0 < step < config.steps

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate after this step if that is due. The last step always is, from `finish`."""
        if self.is_due(step):
            self.evaluate()

    def catch_up(self) -> None:
        """Evaluate the model that the run resumes from, if the generation before ended before it could."""
        training, step = self._training, self._training.progress.step
        if self.is_due(step):
            done = training.leads and training.retry(lambda: training.record.evaluated(step, "tasks"))
            if not training.collectives.from_first(int(done)):
                self.evaluate()

    def evaluate(self) -> None:
        """Evaluate the current model, if the configuration names tasks and the model's head gives logits."""
        training, step = self._training, self._training.progress.step
        answer = training.runtime.tasks
        if answer is None or not training.config.evaluation.tasks.files or training.config.objective.HEAD:
            return
        training.watch.mark(step, "tasks")
        scores = answer(training.model, training.source.domains[0], training.config, training.collectives)
        self._metrics.record(step, {"tasks": scores})
        training.timeline.spent("productive")
