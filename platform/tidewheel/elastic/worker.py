"""What runs in each worker: put together the `Runtime` and call the training loop."""

from __future__ import annotations

import time
from typing import Any

from tidewheel.elastic.coordinator import NAMESPACE

POLL_SECONDS = 0.2


class RunControl:
    """`train.runtime.Control` over the coordinator. Nothing here waits for the network but `hold`."""

    def __init__(self, coordinator: Any, generation: int, rank: int, hold_seconds: float) -> None:
        self._coordinator, self._generation, self._rank = coordinator, generation, rank
        self._hold_seconds = hold_seconds
        self._question: Any = None  # an answer that is on its way
        self._asked_at = 0.0

    def poll(self) -> bool:
        import ray

        if self._question is None:
            if time.monotonic() - self._asked_at < POLL_SECONDS:
                return False
            self._asked_at = time.monotonic()
            self._question = self._coordinator.wanted.remote(self._generation)
        ready, _ = ray.wait([self._question], timeout=0)
        if not ready:
            return False
        answer, self._question = ray.get(self._question), None
        return bool(answer)

    def hold(self, step: int) -> None:
        import ray

        if self._rank == 0:
            ray.get(self._coordinator.held.remote(self._generation, step))
        until = time.monotonic() + self._hold_seconds
        while ray.get(self._coordinator.holding.remote(self._generation)):
            if time.monotonic() > until:
                ray.get(self._coordinator.release.remote(self._generation))
                return
            time.sleep(POLL_SECONDS)

    def event(self, kind: str, **detail: Any) -> None:
        self._coordinator.event.remote(kind, {"rank": self._rank, **detail}, time.time())

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        self._coordinator.step.remote(self._generation, {"step": step, "steps": steps, **metrics})


def run_worker(settings: dict[str, Any]) -> Any:
    """`train_loop_per_worker`; returns rank 0's `TrainResult`.

    Args:
        settings: "config" (`TrainConfig` as JSON values) and "coordinator" (the actor's name).
    """
    import ray
    import ray.train

    from tidewheel import storage
    from tidewheel.checkpoint.manager import CheckpointManager
    from tidewheel.train.config import TrainConfig
    from tidewheel.train.loop import train
    from tidewheel.train.runtime import Runtime

    config = TrainConfig.model_validate(settings["config"])
    coordinator = ray.get_actor(settings["coordinator"], namespace=NAMESPACE)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    snapshot: Any = ray.get(coordinator.snapshot.remote())
    generation = snapshot.generation
    control = RunControl(coordinator, generation, rank, config.elastic.hold_seconds)
    manager = CheckpointManager.of(storage.store(config.run_uri).child("checkpoints"), config.checkpoint,
                                   lambda kind, detail: control.event(kind, **detail))
    runtime = Runtime(rank=rank, world_size=context.get_world_size(), device=_device(config), generation=generation,
                      checkpoints=manager, control=control, sinks=_sinks(config, rank),
                      node=ray.get_runtime_context().get_node_id()[:12], evaluated_beside=True)
    result = train(config, runtime)
    return result if rank == 0 else None


def _sinks(config: Any, rank: int) -> list[Any]:
    if rank or not config.metrics.prometheus:
        return []
    from tidewheel.elastic.gauges import RayGauges

    return [RayGauges(config.run.id)]


def _device(config: Any) -> Any:
    if not config.elastic.gpus_per_worker:
        return "cpu"
    import ray.train.torch

    return ray.train.torch.get_device()
