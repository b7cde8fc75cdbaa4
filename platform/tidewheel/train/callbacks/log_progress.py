"""Log the progress of the run."""

from __future__ import annotations

import logging
import math
import time

from pydantic import Field

from tidewheel.train.callback import Callback, Step, Worker

logger = logging.getLogger(__name__)


class LogProgress(Callback):
    """Logs step, loss and time at an interval, and each committed checkpoint."""

    every_seconds: float = Field(default=30.0, ge=0)
    """Time between two lines; 0: a line for each step."""
    _logged: float = -math.inf

    def on_step_end(self, worker: Worker, step: Step) -> None:
        now = time.monotonic()
        if now - self._logged < self.every_seconds and step.step < worker.steps:
            return
        self._logged = now
        loss = "not finite" if step.loss is None else f"{step.loss:.4f}"
        logger.info("step %d of %d, loss %s, %.2f s%s", step.step, worker.steps, loss, step.seconds,
                    ", repeated" if step.redone else "")

    def on_checkpoint(self, worker: Worker, step: int) -> None:
        logger.info("the checkpoint of step %d is committed", step)
