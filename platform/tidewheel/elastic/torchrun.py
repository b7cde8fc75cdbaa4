"""Train in the processes that torchrun started, without Ray: one rank in each, and checkpoints in storage only.

torchrun gives each process its place in environment variables and hosts the store at which the ranks meet. When a rank
ends, torchrun ends the others. `--max-restarts` starts all of them again, and the run resumes from its newest
checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidewheel.errors import ClusterError, ConfigError
from tidewheel.stopping import Stop
from tidewheel.train.runtime import Control

if TYPE_CHECKING:
    import torch

    from tidewheel.elastic.process_group import GenerationGroup
    from tidewheel.train.config import TrainConfig
    from tidewheel.train.record import TrainResult
    from tidewheel.train.run import Run

logger = logging.getLogger(__name__)
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets in each process (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables)."""
SIGNAL_SECONDS = 10.0
"""A rank whose peer has ended waits this long for torchrun's SIGTERM, so that torchrun sees the other failure first."""


@dataclass(frozen=True)
class Place:
    """This process's place among the ranks that torchrun started."""

    rank: int
    world_size: int
    local_rank: int
    """Number of the process on its node."""
    local_world_size: int | None = None
    """Processes on its node; None if torchrun does not tell."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place, or None if torchrun did not start it.

    Args:
        environment: the environment variables.

    Raises:
        ConfigError: a variable is no number, or the numbers do not fit each other.
    """
    if not all(environment.get(name) for name in VARIABLES):
        return None
    numbers = {name: _number(name, environment[name]) for name in VARIABLES if name != "MASTER_ADDR"}
    local_size = environment.get("LOCAL_WORLD_SIZE")
    result = Place(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"],
                   _number("LOCAL_WORLD_SIZE", local_size) if local_size else None)
    if result.rank >= result.world_size or result.local_rank > result.rank:
        raise ConfigError(f"RANK {result.rank}, LOCAL_RANK {result.local_rank} and WORLD_SIZE {result.world_size} "
                          "do not fit each other", where="environment",
                          fix="start with torchrun, or unset RANK to train without it")
    return result


def split_groups(where: Place, tensor: int) -> int:
    """Return how many tensor-parallel groups span two nodes; 0 if torchrun does not tell.

    torchrun numbers the ranks node by node, with as many on each node as on this one.

    Args:
        where: this process's place.
        tensor: ranks of a group.
    """
    per_node = where.local_world_size
    if not per_node:
        return 0
    firsts = range(0, where.world_size, tensor)
    return sum(first // per_node != (first + tensor - 1) // per_node for first in firsts)


def _number(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise ConfigError(f"{name} is {value!r}, not a number", where="environment",
                          fix=f"start with torchrun, which sets it, or unset {name} to train without torchrun")
    return int(value)


def device_of(where: Place, name: str = "") -> torch.device:
    """Return the rank's device, ready for use: the GPU of its local rank, or the CPU on a machine without GPUs.

    Args:
        where: the rank.
        name: "cpu" for the CPU on a machine with GPUs; "" to choose.

    Raises:
        ConfigError: another name, or the machine has fewer GPUs than ranks.
    """
    import torch

    from tidewheel.train.local_device import local_device

    if name not in ("", "cpu"):
        raise ConfigError(f"each torchrun rank uses the GPU of its local rank, not {name!r}", where="--device",
                          fix="leave it out, or give cpu; CUDA_VISIBLE_DEVICES chooses GPUs")
    if name == "cpu" or not torch.cuda.is_available():
        return local_device("cpu")
    count = torch.cuda.device_count()
    if where.local_rank >= count:
        raise ConfigError(f"local rank {where.local_rank} has no GPU: torch sees {count} here",
                          where="torchrun --nproc-per-node", fix=f"start at most {count} ranks on this node")
    return local_device(f"cuda:{where.local_rank}")


def fit_ranks(run: Run | TrainConfig, where: Place, *, device: torch.device | str = "cpu",
              on_progress: Callable[[dict[str, Any]], None] | None = None, take_over: bool = False,
              stop: Stop | None = None) -> TrainResult:
    """Train as one of torchrun's ranks until `config.steps`. All ranks call it.

    Args:
        run: the open run, or the settings to open it with.
        where: this process's rank.
        device: see `device_of`.
        on_progress: see `trainer.fit`; called on rank 0, in the thread that trains.
        take_over: take the run away from a driver that still trains it.
        stop: when it is requested on rank 0, all ranks save and raise `Stopped`.

    Raises:
        OwnershipError: another driver trains the run, or has taken it over.
        ClusterError: another rank has ended or does not respond.
        TidewheelError: another error that the user can fix.
    """
    from tidewheel.elastic.faults import report
    from tidewheel.elastic.process_group import GenerationGroup
    from tidewheel.post.running import prepare
    from tidewheel.train.parallel import legal
    from tidewheel.train.run import Run

    run = Run.open(run)
    finished = run.result()
    if finished is not None:
        return finished
    if run.config.rollouts is not None and not run.config.rollouts.replay:
        raise ConfigError("torchrun starts no processes that sample rollouts", where="rollouts",
                          fix="start the run with `tidewheel train CONFIG`, on a Ray cluster or with --local")
    prepare(run)
    legal.check_world(run.config, where.world_size)
    run.check()
    stop = stop or Stop()
    group = GenerationGroup()
    try:
        group.open_from_environment(where.rank, where.world_size, device)
        return _train(run, where, group, device, on_progress, take_over, stop)
    except Exception as error:
        outcome = report(error, broken=group.broken, stepped=True)
        if where.world_size == 1 or outcome.error_kind:
            raise
        logger.info("rank %d ends here", where.rank, exc_info=error)
        stop.requested.wait(SIGNAL_SECONDS)
        raise ClusterError(f"rank {where.rank} of {where.world_size} ends because another rank ended or does not "
                           f"respond ({outcome.text})", where="torchrun",
                           fix="see the first failure in torchrun's report; the same command resumes from the newest "
                               "checkpoint, and torchrun --max-restarts repeats it automatically") from error
    finally:
        with contextlib.suppress(RuntimeError):  # a group whose peers are gone cannot be torn down in order
            group.close()


def _train(run: Run, where: Place, group: GenerationGroup, device: torch.device | str,
           on_progress: Callable[[dict[str, Any]], None] | None, take_over: bool, stop: Stop) -> TrainResult:
    """Own the run on rank 0, and train on every rank."""
    from tidewheel.checkpoint.manager import CheckpointManager
    from tidewheel.checkpoint.starting import check_start
    from tidewheel.commit_log import first_generation
    from tidewheel.elastic.trainer import owned_here
    from tidewheel.inference.answers import answer
    from tidewheel.inference.during_training import check_tasks, task_scores
    from tidewheel.inference.sample import text_sample
    from tidewheel.outer.exchange import Exchange
    from tidewheel.train.collectives import Collectives
    from tidewheel.train.logs.worker_log import logging_process
    from tidewheel.train.loop import train
    from tidewheel.train.runtime import Runtime

    with contextlib.ExitStack() as stack:
        epoch = 0
        control: Control = FollowerControl(stop)
        if where.leads:
            run.check_files()
            check_start(run)
            check_tasks(run.config)
            run.store.check()
            epoch, control = stack.enter_context(owned_here(run, on_progress, take_over, stop))
            tensor = run.config.parallel.tensor
            if split := split_groups(where, tensor):
                control.event("tensor_groups_split", groups=split, of=where.world_size // tensor, tensor=tensor)
        runtime = Runtime(rank=where.rank, world_size=where.world_size, device=device, group=group, control=control,
                          sampler=text_sample, answerer=answer, tasks=task_scores, outer=Exchange)
        runtime.generation = first_generation(Collectives(runtime).from_first(epoch))
        manager = CheckpointManager.of(run.checkpoints, run.config.checkpoint,
                                       lambda kind, detail: runtime.control.event(kind, **detail),
                                       generation=runtime.generation)
        runtime.checkpoints = manager
        group.also_break(manager.break_off)
        stack.callback(manager.break_off)  # an upload that the run did not wait for must not go on beside the next one
        stack.enter_context(logging_process(run.config.logs, run.store, run=run.config.run.id,
                                            node=socket.gethostname(), capture=False))
        return train(run, runtime)


class FollowerControl(Control):
    """The `Control` of a rank other than 0: the loop asks it only to make way.

    Args:
        stop: this process's request to stop, which torchrun gives all ranks.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    def poll(self) -> bool:
        return False

    def save_requested(self) -> bool:
        return False

    def hold(self, step: int) -> None:
        raise self._stop.stopped(f"saved at step {step}")

    def event(self, kind: str, **detail: Any) -> None:
        logger.info("event %s %s", kind, json.dumps(detail, default=str))

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        return
