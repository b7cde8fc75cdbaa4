"""Train a run: `fit` on the connected Ray cluster, `fit_local` in this process.

Both resume a run that was interrupted, and return at once if the run is over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tidewheel import storage
from tidewheel.autoscaler import START_SECONDS, can_grow
from tidewheel.commit_log import first_generation
from tidewheel.commit_record import Record
from tidewheel.elastic import layout
from tidewheel.elastic.coordinator_actor import CALL_SECONDS, coordinating, taken_away
from tidewheel.errors import ClusterError, ConfigError, OwnershipError, TidewheelError
from tidewheel.jsonlog import JsonLog
from tidewheel.ownership import CHECKPOINTS, Renewal, owning
from tidewheel.placement import with_labels
from tidewheel.private_folders import temporary_folder
from tidewheel.stopping import Stop
from tidewheel.train import starts
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import legal
from tidewheel.train.record import TrainResult
from tidewheel.train.run import Run
from tidewheel.train.runtime import Control, Runtime

if TYPE_CHECKING:
    import torch

    from tidewheel.elastic.coordinator import Snapshot
    from tidewheel.post.pool import Pool

logger = logging.getLogger(__name__)
OnProgress = Callable[[dict[str, Any]], None]
PROGRESS_SECONDS = 0.3
LOGS_SECONDS = 20.0
"""Time for the tasks that fetch the last log lines of killed workers."""
SHOWN = ("setting_changed", "continued_before_decay", "branched")
"""Events that a run without a cluster shows."""


def fit(run: Run | TrainConfig, *, on_progress: OnProgress | None = None, take_over: bool = False) -> TrainResult:
    """Train on the connected Ray cluster, with as many workers as fit, until `config.steps`.

    Workers and nodes may die, drain and join meanwhile. After the death of the driver, call `fit` again.

    Args:
        run: the open run, or the settings to open it with.
        on_progress: called about three times a second, from a thread of its own, with "state" and, once known, "step",
            "steps", "loss", "tokens", "tokens_per_second" and "world_size". "events" holds the newsworthy events since
            the last call (`run_events.NEWSWORTHY`), as in events.jsonl.
        take_over: take the run away from a driver that still trains it. What that driver writes later is ignored.

    Raises:
        OwnershipError: another driver trains the run, or has taken it over.
        ClusterError: not connected, too few CPUs or GPUs, or the run failed for good.
        TidewheelError: another error that the user can fix, as a worker raised it.
    """
    run = Run.open(run)
    finished = run.result()
    if finished is not None:
        return finished
    from tidewheel.checkpoint.starting import check_start
    from tidewheel.elastic.evaluator import evaluating
    from tidewheel.elastic.worker import run_worker

    if run.config.rollouts is not None:
        from tidewheel.post.running import prepare  # imports torch: seconds, which a driver does without if it can

        prepare(run)
    run.check()
    run.check_files()  # before any process starts
    check_start(run)
    if run.config.evaluation.tasks.files:
        from tidewheel.inference.during_training import check_tasks  # imports torch

        check_tasks(run.config)
    with evaluating(run.config):
        return run_workers(run, run_worker, on_progress, take_over=take_over)


def _ray_pool(arguments: tuple[Any, ...], config: TrainConfig, on_event: Callable[..., None]) -> Pool:
    from tidewheel.post.pool import RayPool

    assert config.rollouts is not None
    if config.rollouts.generators.colocated:
        raise ConfigError("generators are colocated with training in one process only",
                          where="rollouts.generators.colocated", fix="leave it out, or train with --local")
    return RayPool(arguments, config.rollouts.generators, on_event)


def _local_pool(arguments: tuple[Any, ...], config: TrainConfig, on_event: Callable[..., None]) -> Pool:
    from tidewheel.post.colocated import ColocatedPool
    from tidewheel.post.pool import LocalPool

    assert config.rollouts is not None
    if config.rollouts.generators.colocated:
        return ColocatedPool(arguments)
    return LocalPool(arguments, config.rollouts.generators, on_event)


def run_workers(run: Run | TrainConfig, worker: Callable[[dict[str, Any]], Any],
                on_progress: OnProgress | None = None, *, take_over: bool = False) -> Any:
    """Train like `fit`, with any function as the worker.

    Args:
        run: the open run, or the settings to open it with.
        worker: called in each worker with the settings that `worker.run_worker` documents.
        on_progress: see `fit`.
        take_over: see `fit`.

    Raises:
        OwnershipError: another driver trains the run, or has taken it over.
        ClusterError: not connected, too few CPUs or GPUs, or the run failed for good.
    """
    import ray

    if not ray.is_initialized():
        raise ClusterError("not connected to a Ray cluster", where="elastic.trainer.fit",
                           fix="call ray.init(address=...) first, or use `tidewheel train`")
    from tidewheel.elastic.ray_contract import check_ray

    check_ray()
    from tidewheel.elastic.lost_actors import LostActorError, outliving

    run = Run.open(run)
    sizes = _sizes(run.config)
    run.store.check()

    def attempt(before: LostActorError | None) -> Any:
        return _run_once(run, worker, on_progress, sizes, take_over=take_over and before is None, before=before)

    return outliving(attempt)


def _run_once(run: Run, worker: Callable[[dict[str, Any]], Any], on_progress: OnProgress | None, sizes: tuple[int, ...],
              *, take_over: bool, before: Exception | None) -> Any:
    """Train to the end with a coordinator and a controller.

    Args:
        run: the open run.
        worker: see `run_workers`.
        on_progress: see `fit`.
        sizes: legal numbers of workers.
        take_over: see `fit`.
        before: the loss of the coordinator or the controller that ended the attempt before this one.

    Raises:
        LostActorError: one of the two died.
    """
    from ray.exceptions import RayActorError

    from tidewheel.elastic.lost_actors import ending_frozen, is_gone, lost
    from tidewheel.elastic.ray_adapter import ElasticTrainer

    called = time.time()
    config = run.config
    with temporary_folder("train") as bookkeeping:
        with _owning(run.store, take_over) as record, \
                coordinating(config, sizes, record.epoch, called) as (name, coordinator), \
                ending_frozen(coordinator), _reporting(coordinator, on_progress):
            for change in starts.record_start(run.store, config, record.epoch):
                if change.is_reported:
                    coordinator.event.remote("setting_changed", _change_detail(change))
            if before is not None:
                coordinator.event.remote("coordinator_lost", {"error": str(before).splitlines()[0]})
            trainer = ElasticTrainer(
                worker, {"config": config.canonical(), "coordinator": name,
                         "code": [asdict(code) for code in config.code()]},
                elastic=config.elastic, sizes=sizes, coordinator=coordinator, name=config.run.id,
                storage_path=str(bookkeeping))
            if config.rollouts is not None:
                trainer.start_early(placed=True)  # before generators, which would take the room of these
            try:
                with _making_rollouts(run):
                    return trainer.run()
            except (RayActorError, TidewheelError) as error:
                other = taken_away(coordinator, run.store, record.epoch)
                if other is None and (isinstance(error, RayActorError) or is_gone(coordinator)):
                    raise lost(error) from error
                raise error if other is None else other from error
            finally:
                _fetch_logs(run.uri, coordinator)


def _making_rollouts(run: Run) -> contextlib.AbstractContextManager[None]:
    """Make the run's rollouts during the block, if it trains on any."""
    if run.config.rollouts is None:
        return contextlib.nullcontext()
    from tidewheel.post.running import making_rollouts

    return making_rollouts(run, _ray_pool)


def _fetch_logs(run_uri: str, coordinator: Any) -> None:
    """Write the last log lines of killed workers, which are on their nodes, to the run's logs/."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tidewheel.elastic import nodes

    try:
        lossy: list[str] = ray.get(coordinator.nodes_with_losses.remote(), timeout=CALL_SECONDS)
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(pass_on_logs)
        tasks = [remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(
            run_uri) for node in nodes.alive() if node.node_id in lossy]
        if tasks:
            ray.wait(tasks, num_returns=len(tasks), timeout=LOGS_SECONDS)
    except Exception as error:  # the outcome of the run matters more
        logger.warning("the last log lines of killed workers were not fetched: %s", error)


def pass_on_logs(run_uri: str) -> int:
    """Write the last log lines of this node's killed workers to the run's logs/; return the number of workers."""
    from tidewheel.train.logs.worker_log import pass_on_abandoned

    return pass_on_abandoned(storage.store(run_uri))


def _owning(run: storage.Store, take_over: bool) -> contextlib.AbstractContextManager[Record]:
    """Own the run inside the block; see `ownership.owning`."""
    from tidewheel.checkpoint.verify import list_checkpoints

    def committed() -> list[str]:
        return [info.name for info in list_checkpoints(run.child(CHECKPOINTS)) if info.committed]

    return owning(run, committed=committed, force=take_over,
                  say=lambda line: print(line, file=sys.stderr, flush=True))


def _change_detail(change: starts.Change) -> dict[str, Any]:
    return {"setting": change.key, "before": change.before, "now": change.now}


def fit_local(run: Run | TrainConfig, *, on_progress: OnProgress | None = None, take_over: bool = False,
              stop: Stop | None = None, device: torch.device | str = "cpu") -> TrainResult:
    """Train in this process with one worker and without Ray: for debugging, and as an undisturbed reference.

    Args:
        run: the open run, or the settings to open it with.
        on_progress: see `fit`; called in the thread that trains.
        take_over: see `fit`.
        stop: when it is requested, save and raise `Stopped`.
        device: trains there; see `train.local_device`.

    Raises:
        OwnershipError: another driver trains the run, or has taken it over.
    """
    from tidewheel.checkpoint.manager import CheckpointManager
    from tidewheel.checkpoint.starting import check_start
    from tidewheel.inference.answers import answer
    from tidewheel.inference.during_training import check_tasks, task_scores
    from tidewheel.inference.sample import text_sample
    from tidewheel.outer.exchange import Exchange
    from tidewheel.post.running import making_rollouts, prepare
    from tidewheel.train.logs.worker_log import logging_process
    from tidewheel.train.loop import train
    from tidewheel.train.parallel.mesh import close_own_group

    run = Run.open(run)
    config = run.config
    finished = run.result()
    if finished is not None:
        return finished
    prepare(run)
    run.check()
    run.check_files()
    check_start(run)
    check_tasks(run.config)
    run.store.check()
    with owned_here(run, on_progress, take_over, stop) as (epoch, control), making_rollouts(run, _local_pool):
        generation = first_generation(epoch)
        manager = CheckpointManager.of(run.checkpoints, config.checkpoint,
                                       lambda kind, detail: control.event(kind, **detail), generation=generation)
        try:
            with logging_process(config.logs, run.store, run=config.run.id, node=socket.gethostname(), capture=False):
                return train(run, Runtime(device=device, checkpoints=manager, control=control, generation=generation,
                                          sampler=text_sample, answerer=answer, tasks=task_scores,
                                          outer=Exchange))
        finally:
            close_own_group()
            manager.break_off()  # an upload that the run did not wait for must not go on beside the next one


@contextlib.contextmanager
def owned_here(run: Run, on_progress: OnProgress | None, take_over: bool,
               stop: Stop | None) -> Iterator[tuple[int, LocalControl]]:
    """Own the run in this process during the block; yield the owner's epoch and the run's control.

    Args:
        run: the open run.
        on_progress: see `fit`.
        take_over: see `fit`.
        stop: a request to stop.

    Raises:
        OwnershipError: another driver trains the run.
    """
    with _owning(run.store, take_over) as record:
        log = JsonLog(run.store, "events.jsonl", order=first_generation(record.epoch))
        control = LocalControl(log, on_progress, stop)
        for change in starts.record_start(run.store, run.config, record.epoch):
            if change.is_reported:
                control.event("setting_changed", **_change_detail(change))
        renewal = Renewal(run.store, record.epoch, control.lose)
        try:
            yield record.epoch, control
        finally:
            renewal.close()
            control.log.flush()


class LocalControl(Control):
    """The `Control` of a run without a cluster.

    Args:
        log: the run's events.jsonl.
        on_progress: see `fit`.
        stop: a request to stop; default: none ever comes.
    """

    def __init__(self, log: JsonLog, on_progress: OnProgress | None, stop: Stop | None = None) -> None:
        self.log = log
        self._on_progress = on_progress
        self._stop = stop or Stop()
        self._lost: OwnershipError | None = None

    def lose(self, error: OwnershipError) -> None:
        """End the training at the next step: another driver owns the run."""
        self._lost = error

    def poll(self) -> bool:
        if self._lost is not None:
            raise self._lost
        return self._stop.requested.is_set()

    def save_requested(self) -> bool:
        return False

    def hold(self, step: int) -> None:
        self.event("stopped", step=step)
        raise self._stop.stopped(f"saved at step {step}")

    def event(self, kind: str, **detail: Any) -> None:
        logger.info("event %s %s", kind, json.dumps(detail, default=str))
        record = {"time": time.time(), "kind": kind, "detail": detail}
        self.log.append(record)
        if self._on_progress is not None and kind in SHOWN:
            self._on_progress({"state": "running", "events": [record]})

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        if self._on_progress is not None:
            self._on_progress({"state": "running", "step": step, "steps": steps, **metrics})


def _sizes(config: TrainConfig) -> tuple[int, ...]:
    """Return the legal numbers of workers; at least one of them fits now.

    Raises:
        ClusterError: the cluster is too small for the smallest of them.
    """
    from tidewheel.elastic import nodes

    elastic = config.elastic
    sizes = layout.sizes(config)
    selector = elastic.placement.selector
    offers = [node.resources for node in nodes.usable(selector)]
    slots = layout.slots(offers, elastic.needs)
    if slots < sizes[0] and not can_grow(START_SECONDS):
        needs = _listed(elastic.needs)
        offered = [_listed({name: offer.get(name, 0.0) for name in elastic.needs}) for offer in offers]
        has = "; ".join(offered) or "no nodes"
        mesh = f" for {legal.describe(config.parallel)}" if config.parallel.unit > 1 else ""
        raise ClusterError(f"{sizes[0]} worker(s) of {needs} each{mesh} do not fit: the cluster's "
                           f"{len(offers)} node(s){with_labels(selector)} ({has}) have room for {slots}",
                           where="elastic.min_workers",
                           fix="lower elastic.min_workers or cpus_per_worker, "
                           + ("make the mesh smaller, " if mesh else "")
                           + ("correct elastic.placement, " if selector else "") + "or add nodes")
    return sizes


def _listed(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}{'s' * (name in ('CPU', 'GPU'))}" for name, amount in resources.items())


@contextlib.contextmanager
def _reporting(coordinator: Any, on_progress: OnProgress | None) -> Iterator[None]:
    """Call `on_progress` with progress and events while the block runs."""
    if on_progress is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_report, args=(coordinator, on_progress, ended), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=10)


def _report(coordinator: Any, on_progress: OnProgress, ended: threading.Event) -> None:
    import ray

    last: dict[str, Any] = {}
    over = False
    while not over:
        over = ended.wait(PROGRESS_SECONDS)  # once more at the end, so that the last step is shown
        try:
            snapshot: Snapshot = ray.get(coordinator.snapshot.remote(), timeout=CALL_SECONDS)
            events = ray.get(coordinator.news.remote(), timeout=CALL_SECONDS)
        except ray.exceptions.RayError:
            continue
        now = {"state": snapshot.state, **snapshot.progress}
        if now != last or events:
            on_progress({**now, "events": events})
            last = now
