"""The base class of callbacks: parts that the training loop calls.

    class Milestones(tw.Callback):
        "Say when the loss falls below a bound."
        below: float = 3.0

        def on_step_end(self, worker: tw.Worker, step: tw.Step) -> None:
            if step.loss is not None and step.loss < self.below:
                print(f"{worker.run}: loss {step.loss:.3f} at step {step.step}")

Nothing here imports torch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tidewheel.errors import TidewheelError
from tidewheel.parts import Part, name_of
from tidewheel.train.failures import is_passing, mistake

if TYPE_CHECKING:
    from tidewheel.train.evaluation import Score
    from tidewheel.train.record import TrainResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Worker:
    """The worker that a callback runs in, for one generation of workers."""

    run: str
    """Id of the run."""
    uri: str
    """URI of the run's folder."""
    steps: int
    """Steps of the whole run."""
    rank: int
    world_size: int
    generation: int
    record: Callable[[int, Mapping[str, float]], None]
    """`record(step, {"name": number})` adds figures of a step to metrics.jsonl and hands them to the trackers, on
    rank 0; elsewhere it does nothing."""


@dataclass(frozen=True)
class Step:
    """A step that is done; the same on every rank except for times."""

    step: int
    """Counts from 1."""
    tokens: int
    """Real tokens trained on since the run began."""
    loss: float | None
    """Loss in nats per token over the global batch; None if it is not finite."""
    gradient_norm: float | None
    """Norm before clipping; None if it is not finite."""
    learning_rate: float
    seconds: float
    """Duration of the step on this rank, with the wait for data."""
    data_wait_seconds: float
    redone: bool
    """Whether the step was done before a failure or rollback. Callbacks may have seen it then."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The objective's metrics beside the loss."""


class Callback(Part):
    """Base of every callback; its fields are its settings.

    The training thread of rank 0 calls it and waits for it; with `EVERY_RANK`, that of each rank. Each generation of
    workers starts with a fresh copy, so state that must survive a failure belongs in a file or a service.

    It sees each step at least once. After a failure the run resumes from its newest checkpoint and repeats the steps
    behind it (`Step.redone`), with the same figures in reproducible mode. So a callback must be idempotent: store
    figures under the step's number instead of adding them up.

    A mistake in its code ends the run. An error that may pass (a refused connection, a timeout, a full disk; see
    `train.failures`) is logged and counted, and the run goes on.
    """

    EVERY_RANK: ClassVar[bool] = False
    """Whether to call it on all ranks instead of rank 0 alone."""

    def on_start(self, worker: Worker, step: int) -> None:
        """Called when a generation of workers starts; the run continues after `step`, 0 at its beginning."""

    def on_step_end(self, worker: Worker, step: Step) -> None:
        """Called after each step, before its save or evaluation."""

    def on_evaluate(self, worker: Worker, step: int, scores: Mapping[str, Score]) -> None:
        """Called after the training has evaluated a model.

        Args:
            worker: this worker.
            step: the model's step.
            scores: by name of the validation set.
        """

    def on_sample(self, worker: Worker, step: int, text: str) -> None:
        """Called after the training has written a text sample.

        Args:
            worker: this worker.
            step: step of the model that wrote it.
            text: the sample.
        """

    def on_checkpoint(self, worker: Worker, step: int) -> None:
        """Called on rank 0 at the first step boundary after the checkpoint of `step` is committed.

        It may not be called for a checkpoint that is committed while its generation ends.
        """

    def on_rollback(self, worker: Worker, step: int, back_to: int) -> None:
        """Called after a guard has rolled the run back.

        Args:
            worker: this worker.
            step: step at which the guard acted.
            back_to: step of the checkpoint from which the run continues.
        """

    def on_finish(self, worker: Worker, result: TrainResult) -> None:
        """Called when the run is over and its last checkpoint is committed."""

    def on_close(self) -> None:
        """Called last, however the generation ends, unless the process is killed."""


class Callbacks:
    """The callbacks of one worker and generation, called in the order of the configuration.

    Args:
        callbacks: callbacks of the configuration.
        worker: the worker that they run in.
        on_failure: called with (name of the callback, hook, reason, failed calls so far) when a callback first fails
            with a passing error, and again after a success.
    """

    def __init__(self, callbacks: Sequence[Callback], worker: Worker,
                 on_failure: Callable[[str, str, str, int], None] | None = None) -> None:
        self._callbacks = [callback.model_copy() for callback in callbacks if worker.rank == 0 or callback.EVERY_RANK]
        self._worker = worker
        self._on_failure = on_failure
        self.failures: Counter[str] = Counter()
        """Calls that failed with a passing error, by name of the callback."""
        self._failing: set[tuple[int, str]] = set()

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of each callback.

        Args:
            hook: name of the method.
            arguments: its arguments after the worker.

        Raises:
            ConfigError: the code of a callback has a mistake.
        """
        for index, callback in enumerate(self._callbacks):
            try:
                getattr(callback, hook)(self._worker, *arguments)
            except Exception as error:
                if is_passing(error):
                    self._passed(index, hook, error)
                elif isinstance(error, TidewheelError):
                    raise
                else:
                    raise mistake(callback, "callback", hook, error) from error
            else:
                self._failing.discard((index, hook))

    def close(self) -> None:
        """Call `on_close` of each callback and log its errors, which must not hide how the generation ended."""
        for callback in self._callbacks:
            try:
                callback.on_close()
            except Exception:
                logger.exception("the callback %s failed in on_close", name_of(type(callback)))

    def _passed(self, index: int, hook: str, error: Exception) -> None:
        """Count an error that may pass; log and report it when it is the first since the hook last worked."""
        name = name_of(type(self._callbacks[index]))
        self.failures[name] += 1
        if (index, hook) in self._failing:
            return
        self._failing.add((index, hook))
        reason = f"{type(error).__name__}: {error}"[:300]
        logger.warning("the callback %s failed in %s, training continues: %s", name, hook, reason)
        if self._on_failure is not None:
            self._on_failure(name, hook, reason, self.failures[name])
