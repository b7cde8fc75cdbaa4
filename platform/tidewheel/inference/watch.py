"""Evaluation of a run's checkpoints beside its training, as they are committed."""

from __future__ import annotations

import itertools
import logging
import threading
import time

from tidewheel import jsonlog, storage
from tidewheel.checkpoint.manager import OnEvent
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.errors import TidewheelError
from tidewheel.inference.evaluate import Evaluator
from tidewheel.jsonlog import NO_GENERATION, JsonLog
from tidewheel.storage import Store
from tidewheel.train import evaluation

logger = logging.getLogger(__name__)
LOOK_BACK = 100_000
"""Number of newest records of metrics that are searched for an evaluation."""


def watch(run_uri: str, *, every_steps: int, ended: threading.Event, on_event: OnEvent, device: str = "",
          seconds: float = 2.0) -> None:
    """Evaluate a run's checkpoints into its metrics.jsonl until `ended` is set.

    A checkpoint is evaluated if it is the newest and `every_steps` have passed since the last evaluation, so a slow
    evaluation never lags behind. A failure is reported once for each reason, and the next checkpoint is tried.

    Args:
        run_uri: the run's folder, which need not exist yet.
        every_steps: steps between evaluations.
        ended: set it to stop.
        on_event: called with ("evaluation_failed", {"reason": text}).
        device: see `Evaluator`.
        seconds: time between two checks for a new checkpoint.
    """
    run = storage.store(run_uri)
    log = JsonLog(run, "metrics.jsonl", order=NO_GENERATION)
    last_step: int | None = None
    evaluator: Evaluator | None = None
    reported = ""
    while not ended.wait(seconds):
        try:
            if last_step is None:
                last_step = _last_evaluation(run)
            newest = [info for info in list_checkpoints(run.child("checkpoints")) if info.complete][-1:]
            step = newest[0].step if newest else 0
            if step // every_steps <= last_step // every_steps:
                continue
            evaluator = evaluator or Evaluator(run_uri, device=device)
            result = evaluator.evaluate(run.at(f"checkpoints/{newest[0].name}"))
            last_step = result.step
            log.append({"time": time.time(), "step": result.step, **evaluation.record(result.scores)})
            log.flush()
        except TidewheelError as error:  # the checkpoint was retired meanwhile or is damaged, or the store is down
            if str(error) != reported:
                reported = str(error)
                logger.warning("the evaluation failed: %s", reported)
                on_event("evaluation_failed", {"reason": reported[:300]})


def _last_evaluation(run: Store) -> int:
    """Return the step of the newest evaluation among the newest metrics, or 0."""
    newest = itertools.islice(jsonlog.newest_first(run, "metrics.jsonl"), LOOK_BACK)
    return next((int(line["step"]) for line in newest if "validation_loss" in line), 0)
