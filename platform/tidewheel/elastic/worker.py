"""What runs in each worker: generation after generation in one process, as the coordinator says."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel.elastic import warm
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.faults import Report, report
from tidewheel.elastic.member import Member, RunControl, end_process, members, notice
from tidewheel.elastic.messages import ExitReason, Join, MemoryPlacement, Over, Probe, Probed, Raise
from tidewheel.elastic.nodes import NAMESPACE
from tidewheel.elastic.process_log import ray_log_folder
from tidewheel.errors import clear_frames
from tidewheel.placement import is_spot
from tidewheel.time_limit import TimeLimit
from tidewheel.train.cuda_environment import prepare_environment, release_memory

if TYPE_CHECKING:
    from tidewheel.checkpoint.tiers import Placement
    from tidewheel.elastic.process_group import GenerationGroup
    from tidewheel.train.config import TrainConfig
    from tidewheel.train.parallel.kept_base import KeptBase
    from tidewheel.train.record import TrainResult
    from tidewheel.train.run import Run

__all__ = ["RestartNeeded", "notice", "ray_log_folder", "run_worker", "take_part"]

logger = logging.getLogger(__name__)
TEXT_CHARACTERS = 300
"""Characters of a probe's problem."""


class RestartNeeded(RuntimeError):
    """In-place recovery has failed: Ray Train must restart its group of workers."""


def run_worker(settings: dict[str, Any]) -> Any:
    """Train as one of Ray Train's workers (`train_loop_per_worker`); return the run's `TrainResult`.

    Args:
        settings: "config" (`TrainConfig` as JSON values), "code" (`parts.Code` of parts outside the package) and
            "coordinator" (the actor's name).

    Raises:
        RestartNeeded: Ray Train must restart its group of workers.
        TidewheelError: an error that the user can fix.
    """
    import ray

    warm.wait_for_imports()
    from tidewheel.parts import Code
    from tidewheel.train.config import TrainConfig

    if settings["config"].get("elastic", {}).get("gpus_per_worker"):
        prepare_environment()  # before anything, also a user's code, starts CUDA
    for code in settings.get("code", ()):
        Code(**code).load()
    config = TrainConfig.model_validate(settings["config"])
    coordinator = ray.get_actor(settings["coordinator"], namespace=NAMESPACE)
    context = ray.get_runtime_context()
    answer: Any = coordinator.endpoint.remote()
    endpoint: Endpoint = ray.get(answer)
    gpus = context.get_accelerator_ids().get("GPU", [])

    def relay() -> tuple[str, int] | None:
        found: Any = coordinator.relay.remote(context.get_node_id())
        return ray.get(found)  # type: ignore[no-any-return]

    return take_part(config, endpoint, name=context.get_actor_id(), node=context.get_node_id(), relay=relay,
                     spot=is_spot(context.get_node_labels()), device=",".join(map(str, gpus)), beside=ray_log_folder())


def take_part(config: TrainConfig, endpoint: Endpoint, *, name: str, node: str, spot: bool = False, device: str = "",
              beside: Path | None = None,
              relay: Callable[[], tuple[str, int] | None] = lambda: None) -> TrainResult | None:
    """Be one of the run's workers until the run is over; return its result.

    Args:
        config: the run's configuration.
        endpoint: where the coordinator listens.
        name: unique name of this process.
        node: id of its node.
        spot: the node may be taken away at any time.
        device: GPUs of this process, as the node numbers them; "" on CPU.
        beside: Ray's log folder, for a copy of the log; None for no copy.
        relay: returns the address of the node's relay, or None; called once the process is warm.

    Raises:
        RestartNeeded: Ray Train must restart its group of workers.
        Exception: an error of this worker that ends the run.
    """
    from tidewheel.train.logs.worker_log import logging_process
    from tidewheel.train.run import Run

    run = Run.open(config)
    with logging_process(config.logs, run.store, run=config.run.id, node=node[:12], capture=True, beside=beside):
        return _take_part(run, endpoint, name=name, node=node, spot=spot, device=device, relay=relay)


def _take_part(run: Run, endpoint: Endpoint, *, name: str, node: str, spot: bool,
               device: str, relay: Callable[[], tuple[str, int] | None]) -> TrainResult | None:
    from tidewheel.train.parallel.kept_base import KeptBase
    from tidewheel.train.record import read_result

    warm.warm_up(run.config, deeply=endpoint.runs)
    kept = KeptBase()
    problem = _problem(run.config, at_start=True) if run.config.elastic.node_checks.at_start else ""
    member = Member(endpoint, name, node, spot=spot, device=device, problem=problem,
                    relay=relay() if run.config.elastic.relayed else None,
                    heartbeat_seconds=run.config.elastic.heartbeat_seconds)
    members.append(member)
    error: BaseException | None = None
    try:
        while True:
            match member.orders.get():
                case Over():
                    return read_result(run.store)
                case Raise(text):
                    if error is not None and not text:
                        raise error
                    raise RestartNeeded(text) from error
                case Probe():
                    member.send(Probed(_problem(run.config), time.time()))
                case Join() as order:
                    error = None
                    error = _generation(run, member, order, node[:12], kept)
                    if member.terminated:
                        end_process()
                    gc.collect()  # free the old model and its groups before the next are built
                    release_memory()
    finally:
        members.remove(member)
        member.close()
        _discard_group()


def _discard_group() -> None:
    """Destroy a default group that lasts longer than its generation."""
    from tidewheel.elastic import reconfiguring

    reconfiguring.discard()


def _generation(run: Run, member: Member, order: Join, node: str, kept: KeptBase) -> BaseException | None:
    """Train in one generation until it ends; return the error that ended it."""
    from tidewheel.elastic.process_group import GenerationGroup
    from tidewheel.train.parallel.caches import StaleProcessError

    group = GenerationGroup()
    member.begin(order.generation, group)
    outcome, failure = _train(run, order, node, RunControl(member, order.rank), group, kept)
    if failure is not None:
        clear_frames(failure)  # frames of the error and its causes hold the model
    try:
        group.close()
    except Exception as error:  # this process cannot be used for the next generation
        _end_after(member, replace(outcome, text=f"{outcome.text}; then {type(error).__name__}: {error}"))
    if isinstance(failure, StaleProcessError):  # nor can this one, which computes for another rank
        _end_after(member, replace(outcome, error_kind=""))  # the node is not to blame
    member.left(outcome)
    return failure


def _train(run: Run, order: Join, node: str, control: RunControl, group: GenerationGroup,
           kept: KeptBase) -> tuple[Report, BaseException | None]:
    """Open the process group and train; return how that ended, and the error if there was one.

    Only frames below `_generation` hold the model, so that they can be cleared.
    """
    from tidewheel.inference.answers import answer
    from tidewheel.inference.during_training import task_scores
    from tidewheel.inference.sample import text_sample
    from tidewheel.outer.exchange import Exchange
    from tidewheel.train.logs.line import HERE
    from tidewheel.train.loop import train
    from tidewheel.train.runtime import Preempted, Runtime

    config = run.config
    generation = order.generation
    HERE.begin(generation, order.rank)  # so that the next line says so
    logger.info("joins generation %d as rank %d of %d", generation, order.rank, order.world_size)
    limit = TimeLimit(what="the generation's work")
    group.also_break(lambda: limit.end("its ranks have parted"))
    try:
        device = _device(config)
        group.open(order.store, generation, order.rank, order.world_size, device)
        with limit.applied(), _checkpoints(run, order, control, group) as checkpoints:
            train(run, Runtime(rank=order.rank, world_size=order.world_size, device=device,
                               generation=generation, checkpoints=checkpoints, control=control,
                               gauges=_gauges(config.run.id), node=node, history=order.past, limit=limit,
                               sampler=text_sample, answerer=answer, tasks=task_scores, outer=Exchange,
                               evaluated_beside=True, group=group, kept=kept))
    except Preempted as preempted:
        return Report(ExitReason.PREEMPTED, saved_step=preempted.step), None
    except Exception as error:
        logger.info("generation %d ends here", generation, exc_info=error)
        return report(error, broken=group.broken, stepped=generation > 0 or control.stepped), error
    return Report(ExitReason.FINISHED), None


@contextlib.contextmanager
def _checkpoints(run: Run, order: Join, control: RunControl, group: GenerationGroup) -> Iterator[Any]:
    """Yield the checkpoints in storage, below the memory tier if every rank's node has an agent."""
    from tidewheel.checkpoint.manager import CheckpointManager
    from tidewheel.checkpoint.tiers import TieredCheckpoints

    def on_event(kind: str, detail: dict[str, Any]) -> None:
        control.event(kind, **detail)

    saved = CheckpointManager.of(run.checkpoints, run.config.checkpoint, on_event,
                                 generation=order.generation)
    group.also_break(saved.break_off)
    try:
        if order.memory is None:
            yield saved
            return
        memory, disk = run.config.checkpoint.memory_tier, run.config.checkpoint.local_disk
        tiers = TieredCheckpoints(
            saved, tier_placement(order.memory), rank=order.rank, world_size=order.world_size,
            generation=order.generation, on_event=on_event, every_steps=memory.every_steps, share=memory.share,
            replica=memory.replica, disk_steps=0 if disk is None else disk.every_steps)
        group.also_break(tiers.break_off)
        try:
            yield tiers
        finally:
            tiers.close()
    finally:
        saved.break_off()  # an upload that the generation did not wait for can never be committed


def tier_placement(memory: MemoryPlacement) -> Placement:
    """Return the coordinator's placement as the memory tier takes it."""
    from tidewheel.checkpoint.tiers import Placement

    table = memory.agents
    assert table is not None, "`Member` completes a placement"
    by_rank = [agent for first, nodes, ranks in memory.ranks for agent in range(first, first + nodes)
               for _ in range(ranks)]
    used = {*by_rank, *memory.gone}
    others = [address for agent, address in enumerate(table.addresses) if agent not in used]
    domains = {table.addresses[agent]: domain for domain, agents in table.domains.items() for agent in agents}
    return Placement(tuple(table.addresses[agent] for agent in by_rank), tuple(others), table.token, domains)


def _problem(config: TrainConfig, *, at_start: bool = False) -> str:
    """Return what a self-test of this process finds; "" if it passes."""
    from tidewheel.elastic import probe

    try:
        if at_start:
            probe.at_start(config, _device(config))
        else:
            probe.probe(config, _device(config))
    except Exception as error:  # any error of a faulty device or a full disk is the result
        return f"{type(error).__name__}: {error}"[:TEXT_CHARACTERS]
    return ""


def _end_after(member: Member, outcome: Report) -> None:
    """Report a failure and end this process."""
    fatal = outcome.reason is ExitReason.FATAL
    member.left(replace(outcome, reason=ExitReason.FATAL if fatal else ExitReason.FAILED))
    end_process(outcome.text)


def _gauges(run: str) -> Callable[[], Any]:
    def gauges() -> Any:
        from tidewheel.elastic.gauges import RayGauges

        return RayGauges(run)

    return gauges


def _device(config: TrainConfig) -> Any:
    if not config.elastic.gpus_per_worker:
        return "cpu"
    import ray.train.torch
    import torch

    device = ray.train.torch.get_device()
    torch.cuda.set_device(device)
    return device
