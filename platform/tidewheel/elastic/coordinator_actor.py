"""The actor of the run's coordinator, as the driver starts, asks and ends it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidewheel import storage
from tidewheel.commit_log import CommitLog, taken_over
from tidewheel.elastic.process_log import LogTarget
from tidewheel.errors import ClusterError, OwnershipError, StorageError
from tidewheel.ownership import CHECKPOINTS, timing
from tidewheel.train.config import TrainConfig

logger = logging.getLogger(__name__)
CALL_SECONDS = 10.0
"""Time for the coordinator to answer a call."""
END_SECONDS = 15.0
"""Time for the coordinator to write what it has collected."""
TAKEN_SECONDS = 10.0
"""Ray frees the name of a killed driver's coordinator within this time."""
MISSED_BEATS = 2
"""A coordinator that is alive notices within this many heartbeats that another driver has taken the run over, and ends.
After that, it is taken to be frozen."""


@contextlib.contextmanager
def coordinating(config: TrainConfig, sizes: tuple[int, ...], epoch: int,
                 called: float = 0.0) -> Iterator[tuple[str, Any]]:
    """Yield name and handle of the run's coordinator, an actor on the driver's node that ends with the driver.

    Args:
        config: the run's settings.
        sizes: legal numbers of workers.
        epoch: epoch in which the driver owns the run.
        called: Unix time at which the driver was asked to train; 0.0: do not measure the start.

    Raises:
        ClusterError: the coordinator of another driver does not end.
        OwnershipError: another driver has taken over the run.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tidewheel.elastic.coordinator import Coordinator, actor_name
    from tidewheel.elastic.nodes import NAMESPACE

    owned = time.time()
    run_uri, disk = config.run_uri, config.checkpoint.local_disk
    name = actor_name(run_uri)
    on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote: Any = ray.remote(Coordinator)
    until = time.monotonic() + min(TAKEN_SECONDS, MISSED_BEATS * timing(storage.store(run_uri)).beat + 1)
    ended_former = False
    actor = None
    while actor is None:
        try:
            actor = remote.options(name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=16,
                                   scheduling_strategy=on_this_node).remote(
                                          run_uri, config.elastic, sizes, epoch=epoch,
                                          memory_tier=bool(config.checkpoint.memory_tier.every_steps),
                                          local_disk=disk and (Path(disk.folder), disk.limit_bytes),
                                          log=LogTarget.of(config), node=on_this_node.node_id,
                                          tensor=config.parallel.tensor, group=config.parallel.group,
                                          called=called, owned=owned,
                                          node_history=config.elastic.node_checks.history or config.run.uri)
        except ValueError:  # the name is taken
            if time.monotonic() > until:
                if ended_former:
                    raise ClusterError("the coordinator of another driver does not end", where=run_uri,
                                       fix="stop that driver, or choose another run.id") from None
                _end_former(name, run_uri, epoch)
                ended_former = True
                until = time.monotonic() + TAKEN_SECONDS
            time.sleep(0.5)
    actor.start.remote(ray.util.get_node_ip_address())
    try:
        yield name, actor
    finally:
        with contextlib.suppress(Exception):  # the run's outcome matters more than a lost event
            ray.get(actor.end.remote(), timeout=END_SECONDS)
        ray.kill(actor)


def _end_former(name: str, run_uri: str, epoch: int) -> None:
    """End the coordinator of the driver that owned the run before this one, which cannot do it: it is frozen.

    Raises:
        OwnershipError: this driver does not own the run any more either.
    """
    import ray

    from tidewheel.elastic.nodes import NAMESPACE

    log = CommitLog(storage.store(run_uri).child(CHECKPOINTS))
    head = log.head()
    if head is None or head.epoch != epoch:
        raise taken_over(log.checkpoints.uri, head)
    logger.warning("the coordinator of the run's former driver is ended: its driver does not do so")
    with contextlib.suppress(ValueError):  # it has ended meanwhile
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def taken_away(coordinator: Any, run: storage.Store, epoch: int) -> OwnershipError | None:
    """Return why the run is no longer this driver's, if that is so.

    Args:
        coordinator: handle of the run's coordinator.
        run: the run's folder.
        epoch: epoch in which the driver owned the run.
    """
    import ray

    try:
        lost: OwnershipError | None = ray.get(coordinator.lost.remote(), timeout=CALL_SECONDS)
    except ray.exceptions.RayError:  # the coordinator is gone, perhaps ended by the driver that took the run over
        log = CommitLog(run.child(CHECKPOINTS))
        with contextlib.suppress(StorageError):
            head = log.head()
            if head is not None and head.epoch != epoch:
                return taken_over(log.checkpoints.uri, head)
        return None
    return lost
