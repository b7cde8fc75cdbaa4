"""Continue a run whose learning rate has decayed: from its last checkpoint before the decay, not from the decayed one.

A schedule with a stable phase (`Schedule.decays_from`) does not depend on the end of the run until its decay begins. So
when such a run gets more steps, the steps before the decay are those of the longer run, and the decayed ones are not.
Every checkpoint names the schedule and the number of steps that it was made under, which is all that is compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pydantic

from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.train import schedules
from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.schedule import Schedule
from tidewheel.train.rates import progress

SAME_RATE = 1e-9
"""Relative difference of two learning rates that are equal."""


class Continuing:
    """Says which checkpoints of a run its present settings can continue.

    Args:
        config: the run's present settings.
        sequence_length: tokens of a sequence.
    """

    def __init__(self, config: TrainConfig, sequence_length: int) -> None:
        self._config, self._length = config, sequence_length
        self._sizes = BatchSizes.of(config.batch, sequence_length)
        self.last_stable_step = self._last_stable_step(config.schedule, config.steps)
        """Last step before the decay; None for a schedule without a stable phase."""
        self._decayed: dict[int, int] = {}

    @property
    def passed_by(self) -> tuple[int, int]:
        """The newest step whose checkpoint `usable` has refused, and the last step before its decay; 0 and 0: none."""
        return max(self._decayed.items(), default=(0, 0))

    def is_before_decay(self, step: int) -> bool:
        """Return whether a run with more steps can continue from the checkpoint of this step."""
        return self.last_stable_step is not None and step <= self.last_stable_step

    def usable(self, extra: Mapping[str, Any]) -> bool:
        """Return whether the run continues from a checkpoint without raising a decayed learning rate again.

        A run that samples its own data always continues from its newest: its policy has sampled what comes next.

        Args:
            extra: the checkpoint's JSON values.
        """
        saved, step = dict(extra.get("schedule") or {}), int(extra["step"])
        steps = int(saved.pop("steps", 0))
        config = self._config
        if not steps or step > min(steps, config.steps) or config.schedule.reheat or config.rollouts is not None:
            return True
        before = _schedule(saved)
        stable = None if before is None else self._last_stable_step(before, steps)
        if before is None or stable is None or step <= stable:
            return True
        is_later = config.steps > steps or self.last_stable_step is None or self.last_stable_step > stable
        decayed = self._share(before, step, steps)
        if not is_later or self._share(config.schedule, step, config.steps) <= decayed * (1 + SAME_RATE):
            return True
        self._decayed[step] = stable
        return False

    def missing(self, newest: int, stable: int) -> CheckpointError:
        """Return the error of a run whose checkpoints are all decayed; see `passed_by` for the arguments."""
        uri = self._config.run_uri
        return CheckpointError(
            f"the learning rate of step {newest:,} has decayed, so more steps continue from before the decay, which "
            f"began after step {stable:,}; but no intact checkpoint up to there is left", where=uri,
            fix="restore one from a copy; or set schedule.reheat=true, and the rate rises to the peak again from step "
                f"{newest:,}; or start a new run with another run.id from these weights: model.init_from={uri}")

    def _last_stable_step(self, schedule: Schedule, steps: int) -> int | None:
        start = schedule.decays_from(progress(schedule, self._sizes, self._length, steps))
        if start is None:
            return None
        return math.floor(start) if schedule.unit == "steps" else self._sizes.steps(int(start // self._length))

    def _share(self, schedule: Schedule, step: int, steps: int) -> float:
        """Return the share of the peak learning rate at a step of a run of `steps` steps."""
        done, total = (progress(schedule, self._sizes, self._length, each) for each in (step, steps))
        return schedule.learning_rate(done, total, 1.0)


def _schedule(saved: dict[str, Any]) -> Schedule | None:
    """Return the schedule that a checkpoint names; None if this release, or the user's code, no longer has it."""
    try:
        return schedules.KIND.build(str(saved.pop("kind")), saved)
    except (ConfigError, pydantic.ValidationError, KeyError):
        return None
