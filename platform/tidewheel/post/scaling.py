"""Decide how many generators a run needs, from how far ahead of the training its rollouts are.

Rollouts that are as far ahead as `look_ahead` allows wait for the trainer, and fewer generators would do. A trainer
that waits for its next rollouts needs more. In between nothing changes.
"""

from __future__ import annotations

from tidewheel.post.policy import newest, published
from tidewheel.storage import Store
from tidewheel.train.policy.config import RolloutsConfig

MORE_AFTER, FEWER_AFTER = 2, 3
"""Steps in a row that must say the same: a join is of use at once, a process that has ended must start anew."""


class Scaling:
    """The number of generators of a run, between `min_processes` and `processes`.

    Args:
        rollouts: the run's settings.
    """

    def __init__(self, rollouts: RolloutsConfig) -> None:
        self._least, self._most = rollouts.generators.min_processes, rollouts.generators.processes
        self._look_ahead = rollouts.look_ahead
        self.processes = self._most
        self._behind = self._ahead = 0  # steps in a row

    def after(self, ahead: int) -> int:
        """Return the number of generators after a step's rollouts.

        Args:
            ahead: waves that wait for the trainer, besides the one that it can now begin: 0 to `look_ahead`.
        """
        self._behind = self._behind + 1 if ahead == 0 else 0
        self._ahead = self._ahead + 1 if 0 < self._look_ahead <= ahead else 0
        if self._behind == MORE_AFTER:
            self.processes, self._behind = min(self.processes + 1, self._most), 0
        if self._ahead == FEWER_AFTER:
            self.processes, self._ahead = max(self.processes - 1, self._least), 0
        return self.processes


class Training:
    """How far the training of a run has come, from the versions of the policy that it publishes.

    Args:
        run: the run's folder.
        stages: of the pipeline; 1 without one.
        wave_steps: steps of a wave of rollouts.
    """

    def __init__(self, run: Store, stages: int, wave_steps: int) -> None:
        self._run, self._stages, self._wave_steps = run, stages, wave_steps
        self._trained = -1  # waves, if the newest version of the policy is known

    def ahead(self, step: int) -> int:
        """Return how many waves besides the next one have rollouts and are not trained.

        Args:
            step: the first step of the newest wave.
        """
        before = (step - 1) // self._wave_steps
        if self._trained < 0:
            version = newest(self._run, self._stages)
            self._trained = -1 if version is None else version.number // self._wave_steps
        while self._trained < before and self._is_published(self._trained + 1):
            self._trained += 1
        return max(0, before - self._trained)

    def _is_published(self, waves: int) -> bool:
        return published(self._run, waves * self._wave_steps, self._stages) is not None
