"""The learning rate of each step: the schedule's, scaled with the batch, and lowered after a rollback."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.schedule import Schedule


def progress(schedule: Schedule, sizes: BatchSizes, sequence_length: int, step: int) -> int:
    """Return the steps or tokens (`Schedule.unit`) at the end of a step.

    Args:
        schedule: has the unit.
        sizes: sequences of every global batch.
        sequence_length: tokens of a sequence.
        step: counts from 1.
    """
    return step if schedule.unit == "steps" else sizes.total(step) * sequence_length


class Rates:
    """Learning rates of a run's steps, a function of its settings and rollbacks.

    Args:
        config: the run's settings.
        sequence_length: tokens of a sequence.
    """

    def __init__(self, config: TrainConfig, sequence_length: int) -> None:
        self._config, self._length = config, sequence_length
        self._sizes = BatchSizes.of(config.batch, sequence_length)
        self._total = progress(config.schedule, self._sizes, sequence_length, config.steps)
        self.rollbacks: tuple[int, ...] = ()
        """Step of the checkpoint that each rollback of the run went back to."""

    def lower_after(self, rollbacks: Sequence[int]) -> None:
        """Lower the rates behind rollbacks, as `guards.rollback_rate` says.

        Args:
            rollbacks: of all rollbacks of the run, the step of the checkpoint that it went back to.
        """
        self.rollbacks = tuple(rollbacks)

    def of(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1.

        Raises:
            ConfigError: the code of the schedule failed.
        """
        config = self._config
        done = progress(config.schedule, self._sizes, self._length, step)
        peak = config.optimizer.learning_rate * self._of_batch(step)
        return config.schedule.learning_rate(done, self._total, peak) * self._of_rollbacks(step)

    def _of_batch(self, step: int) -> float:
        """Return by what the size of the step's batch multiplies the rate."""
        batch = self._config.batch
        if batch.rate_rule == "none":
            return 1.0
        share = int(self._sizes.counts(np.array([step]))[0]) / batch.rate_sequences
        return share if batch.rate_rule == "linear" else share**0.5

    def _of_rollbacks(self, step: int) -> float:
        """Return by what rollbacks multiply the rate: once for each whose steps include this one."""
        guards = self._config.guards
        covering = [back_to for back_to in self.rollbacks if back_to < step <= back_to + guards.rollback_rate_steps]
        return float(guards.rollback_rate ** len(covering))
