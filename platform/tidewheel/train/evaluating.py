"""Evaluate the model and write text samples at the configured steps."""

from __future__ import annotations

from tidewheel.train import evaluation
from tidewheel.train.answers import Answers
from tidewheel.train.callback import Callbacks
from tidewheel.train.evaluating_tasks import EvaluatingTasks
from tidewheel.train.metrics.reporter import Reporter
from tidewheel.train.training import Training


class Evaluating:
    """Evaluates for one worker; all ranks make the same calls.

    Args:
        training: this worker's share of the run.
        metrics: takes the results.
        callbacks: are called with them.
    """

    def __init__(self, training: Training, metrics: Reporter, callbacks: Callbacks) -> None:
        self._training, self._metrics, self._callbacks = training, metrics, callbacks
        self.tasks = EvaluatingTasks(training, metrics)
        self._sets = training.retry(lambda: evaluation.open_sets(training.config, training.device))
        self.answers = Answers(training)

    def is_due(self, step: int) -> bool:
        """Return whether the training evaluates the model of this step, which is not the last."""
        training = self._training
        config = training.config.evaluation
        return (bool(config.every_steps) and step % config.every_steps == 0 and 0 < step < training.config.steps
                and not (config.separate and training.runtime.evaluated_beside))

    def begin(self) -> None:
        """Answer the prompts with the model that the run begins with."""
        self.answers.write(0)

    def catch_up(self, validation_loss: float | None) -> None:
        """Evaluate the model that the run resumes from, if the generation before ended before it could.

        Args:
            validation_loss: as in the checkpoint; None if it has none.
        """
        training, step = self._training, self._training.progress.step
        if validation_loss is None and self.is_due(step):
            done = training.leads and training.retry(lambda: training.record.evaluated(step))
            if not training.collectives.from_first(int(done)):
                self._validate()
        if step == 0 or self.is_due(step):
            self.answers.write(step)

    def evaluate(self) -> None:
        """Evaluate the current model: its loss on the validation sets, and its answers to the prompts."""
        self._validate()
        self.answers.write(self._training.progress.step)

    def _validate(self) -> None:
        """Measure the loss of the parameters and of their averages, if there is a validation set."""
        training, progress = self._training, self._training.progress
        if not self._sets:
            return
        training.watch.mark(progress.step, "evaluate")
        scores = evaluation.validate(training.model, self._sets, training.config, training.collectives)
        progress.validation_loss = evaluation.overall(scores)
        progress.validated = progress.step
        figures = evaluation.record(scores)
        for name in training.averages.names(progress.step):
            with training.averages.in_place(name):
                of_average = evaluation.validate(training.model, self._sets, training.config, training.collectives)
            evaluation.add_average(figures, name, of_average)
        self._metrics.record(progress.step, figures)
        self._callbacks.call("on_evaluate", progress.step, scores)
        training.timeline.spent("productive")

    def sample_is_due(self, step: int) -> bool:
        """Return whether to write a text after this step, which is not the last."""
        config = self._training.config
        every = config.evaluation.sample_every_steps
        return bool(every) and step % every == 0 and step < config.steps

    def sample_if_due(self, step: int) -> None:
        """Write a text after this step if that is due. The last step always has one, from `finish`."""
        if self.sample_is_due(step):
            self.sample()

    def sample(self) -> str:
        """Return a text by the model as it is now; "" without a sampler, or if the model's head gives no logits."""
        training, step = self._training, self._training.progress.step
        if training.runtime.sampler is None or training.config.objective.HEAD:
            return ""
        training.watch.mark(step, "sample")
        text = training.runtime.sampler(training.model, training.source.domains[0], training.config,
                                        training.collectives)
        if text:
            self._metrics.record(step, {"sample": text})
            self._callbacks.call("on_sample", step, text)
        training.timeline.spent("productive")
        return text
