"""Evaluation beside the training: a process of its own on the driver's node, so that no worker waits for it."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

from tidewheel.elastic.process_log import LogTarget, ProcessLog
from tidewheel.train.config import TrainConfig

logger = logging.getLogger(__name__)
END_SECONDS = 5.0
"""Time for the evaluator to write the last lines of its log."""


class EvaluationActor:
    """The actor: `inference.watch.watch` on a thread.

    Args:
        run_uri: the run's folder.
        every_steps: steps between two evaluations.
        device: "cpu" or "cuda".
        log: run whose logs/ gets the log of this process; None to keep none.
        node: id of this process's node, for the log; default: ask Ray.
    """

    def __init__(self, run_uri: str, every_steps: int, device: str, log: LogTarget | None = None,
                 node: str = "") -> None:
        from tidewheel import storage
        from tidewheel.inference.watch import watch
        from tidewheel.jsonlog import NO_GENERATION, JsonLog

        self._log = ProcessLog(log, "evaluator", node or _node())
        events = JsonLog(storage.store(run_uri), "events.jsonl", flush_seconds=0, order=NO_GENERATION)
        self._ended = threading.Event()

        def on_event(kind: str, detail: dict[str, Any]) -> None:
            logger.info("event %s %s", kind, json.dumps(detail, default=str))
            events.append({"time": time.time(), "kind": kind, "detail": detail})

        logger.info("the evaluator looks for a checkpoint every %d steps, on %s", every_steps, device)
        threading.Thread(target=watch, args=(run_uri,), name="evaluation", daemon=True,
                         kwargs={"every_steps": every_steps, "ended": self._ended, "device": device,
                                 "on_event": on_event}).start()

    def end(self) -> None:
        """Begin no other evaluation, and write the last lines of the log."""
        self._ended.set()
        self._log.close()


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


@contextlib.contextmanager
def evaluating(config: TrainConfig) -> Iterator[None]:
    """Evaluate checkpoints as they come while the block runs, if the configuration says so.

    The actor reserves no CPU: it uses what is idle on the driver's node. With `evaluation.gpus` it waits for free GPUs,
    and nothing waits for it.
    """
    settings = config.evaluation
    if not (settings.separate and settings.every_steps and config.data.validation_sets):
        yield
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": settings.gpus, "max_restarts": 3}
    if settings.gpus:
        options["label_selector"] = config.elastic.placement.selector
    else:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False)
    remote: Any = ray.remote(EvaluationActor)
    actor = remote.options(**options).remote(
        config.run_uri, settings.every_steps, "cuda" if settings.gpus else "cpu", LogTarget.of(config))
    try:
        yield
    finally:
        with contextlib.suppress(ray.exceptions.RayError):  # the cluster is gone
            ray.wait([actor.end.remote()], timeout=END_SECONDS)
        ray.kill(actor)
