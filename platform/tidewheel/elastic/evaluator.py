"""Evaluation beside the training: a process of its own on the driver's node, so that no worker waits for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from tidewheel.train.config import TrainConfig


class EvaluationActor:
    """The actor: `inference.watch.watch` on a thread."""

    def __init__(self, run_uri: str, every_steps: int, device: str) -> None:
        from tidewheel import storage
        from tidewheel.inference.watch import watch
        from tidewheel.jsonlog import BESIDE, JsonLog

        log = JsonLog(storage.store(run_uri), "events.jsonl", flush_seconds=0, order=BESIDE)
        ended = threading.Event()

        def on_event(kind: str, detail: dict[str, Any]) -> None:
            log.append({"time": time.time(), "kind": kind, "detail": detail})

        threading.Thread(target=watch, args=(run_uri,), name="evaluation", daemon=True,
                         kwargs={"every_steps": every_steps, "ended": ended, "device": device,
                                 "on_event": on_event}).start()


@contextlib.contextmanager
def evaluating(config: TrainConfig) -> Iterator[None]:
    """While the block runs, checkpoints are evaluated as they come, if the configuration wants that.

    The actor asks for no CPU: it takes what the driver's node has left. With `evaluation.gpus` it waits for GPUs that
    are free, and nothing waits for it.
    """
    wanted = config.evaluation
    if not (wanted.separate and wanted.every_steps and config.data.validation_sets):
        yield
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": wanted.gpus, "max_restarts": 3}
    if wanted.gpus:
        options["label_selector"] = config.elastic.placement.selector
    else:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False)
    remote: Any = ray.remote(EvaluationActor)
    actor = remote.options(**options).remote(config.run_uri, wanted.every_steps, "cuda" if wanted.gpus else "cpu")
    try:
        yield
    finally:
        ray.kill(actor)
