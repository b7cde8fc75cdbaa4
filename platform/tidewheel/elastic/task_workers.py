"""Evaluation tasks on the workers of a Ray cluster: each holds the model and answers unit after unit."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tidewheel.data.stage import Published, Unit
from tidewheel.errors import ClusterError
from tidewheel.inference.tasks.evaluation import (
    OnProgress,
    Options,
    TaskResult,
    answer,
    items_of,
    missing,
    result_of,
    size_of,
    units_of,
)
from tidewheel.inference.tasks.task import Task

logger = logging.getLogger(__name__)
LOSSES = 3
"""Workers that may be lost in a row without a unit in between."""
LEASE_SECONDS = 3600.0
"""A worker that takes longer than this for one unit hangs, and another takes the unit over. The first unit of a worker
includes opening the model."""


@dataclass(frozen=True)
class Model:
    """The model of each worker.

    Args:
        uri: a run, a checkpoint, or a Hugging Face folder.
        settings: arguments of `open_scorer`. With `adapters`, the model answers alone and with each of them.
    """

    uri: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of what answers: "", the model alone, and its adapters."""
        return ("", *(self.settings.get("adapters") or ()))


@dataclass(frozen=True)
class Resources:
    """What to reserve.

    Args:
        workers: number of workers.
        cpus: CPUs of each, and its threads.
        gpus: GPUs of each.
    """

    workers: int
    cpus: float = 1.0
    gpus: float = 0.0


class TaskWorker:
    """The actor: a model and all tasks.

    Args:
        model: to open.
        tasks: with their data, so that workers read no task file.
        chat: see `Options`.
        output: folder of the evaluation.
        threads: of torch.
    """

    def __init__(self, model: Model, tasks: list[Task], chat: bool, output: str, threads: int) -> None:
        import torch

        from tidewheel.inference.scorer import open_scorer

        torch.set_num_threads(threads)
        self._tasks, self._chat, self._output = tasks, chat, output
        scorer = open_scorer(model.uri, **model.settings)
        self._scorers = {adapter: scorer.of(adapter) for adapter in model.adapters}
        self._items = [items_of(task, scorer, chat=chat) for task in tasks]

    def identities(self) -> dict[str, dict[str, Any]]:
        """Return the model's identity with each of its adapters; see `Scorer`."""
        return {adapter: scorer.identity() for adapter, scorer in self._scorers.items()}

    def answer(self, index: int, adapter: str, unit: Unit) -> Published:
        """Answer a unit of a task, and publish it.

        Args:
            index: of the task.
            adapter: that answers; "": none.
            unit: of the task.
        """
        return answer(self._tasks[index], self._items[index], self._scorers[adapter], self._output, unit,
                      chat=self._chat)


def evaluate_on_workers(model: Model, options: Options, output: str, resources: Resources, *,
                        about: Mapping[str, Any] | None = None,
                        on_progress: OnProgress = lambda done, total: None) -> list[TaskResult]:
    """Evaluate tasks on workers of the connected cluster. A worker that is lost is replaced.

    The figures are those of `tasks.evaluation.evaluate`, for every number of workers. With adapters, the model's own
    results come first, then those of each adapter.

    Args:
        model: the model and its adapters, under URIs that all nodes can read.
        options: what to evaluate.
        output: folder that all nodes can write to.
        resources: what to reserve.
        about: what to write into the results.
        on_progress: called as units are done.

    Raises:
        ClusterError: workers are lost again and again.
        ConfigError: a task file is wrong.
        InputError: a task's data is missing or wrong.
    """
    tasks = options.open()
    if not options.chat:
        for task in tasks:
            task.items()  # refuses bad input before a worker starts
    pool = _Pool(model, tasks, options.chat, output, resources)
    try:
        identities = pool.identities()
        subjects = [(adapter, index) for adapter in model.adapters for index in range(len(tasks))]
        units = [units_of(tasks[index], identities[adapter], chat=options.chat) for adapter, index in subjects]
        present, to_do = missing(output, (unit for own in units for unit in own))
        wanted = {unit.key for unit in to_do}
        pending = [(index, adapter, unit) for (adapter, index), own in zip(subjects, units) for unit in own
                   if unit.key in wanted]
        sizes = {unit.key: size_of(unit, tasks[index]) for (_, index), own in zip(subjects, units) for unit in own}
        total = sum(sizes.values())
        done = total - sum(sizes[key] for key in wanted)
        on_progress(done, total)
        for published in pool.answers(pending):
            present[published.unit.key] = published
            done += sizes[published.unit.key]
            on_progress(done, total)
    finally:
        pool.close()
    return [replace(result_of(tasks[index], own, present, output,
                              sum(sizes[unit.key] for unit in own if unit.key in wanted),
                              {"chat": options.chat, "adapter": adapter, **(about or {})}), adapter=adapter)
            for (adapter, index), own in zip(subjects, units)]


@dataclass(frozen=True)
class _Lease:
    """A unit that a worker has, and the time at which it got it."""

    actor: Any
    job: tuple[int, str, Unit]
    since: float


class _Pool:
    """Workers and the units that they have."""

    def __init__(self, model: Model, tasks: list[Task], chat: bool, output: str, resources: Resources) -> None:
        import ray

        self._arguments = (model, ray.put(tasks), chat, output, max(1, int(resources.cpus)))
        self._resources = resources
        self._actors: list[Any] = [self._start() for _ in range(resources.workers)]

    def _start(self) -> Any:
        import ray

        remote: Any = ray.remote(TaskWorker)
        return remote.options(num_cpus=self._resources.cpus, num_gpus=self._resources.gpus).remote(*self._arguments)

    def identities(self) -> dict[str, dict[str, Any]]:
        """Return `TaskWorker.identities` of the first worker that is ready."""
        import ray

        for _ in range(LOSSES):
            try:
                value: dict[str, dict[str, Any]] = ray.get(self._actors[0].identities.remote())
                return value
            except ray.exceptions.RayActorError as error:
                _raise_cause(error)
                self._actors[0] = self._start()
        raise self._lost()

    def answers(self, pending: list[tuple[int, str, Unit]]) -> Any:
        """Yield units as they are published.

        Args:
            pending: (index of the task, name of the adapter, unit).
        """
        waiting = list(reversed(pending))
        idle = list(self._actors)
        running: dict[Any, _Lease] = {}
        losses = 0
        while waiting or running:
            while waiting and idle:
                actor = idle.pop(0)
                job = waiting.pop()
                running[actor.answer.remote(*job)] = _Lease(actor, job, time.monotonic())
            reference, in_time = self._next(running)
            lease = running.pop(reference)
            published = _received(reference) if in_time else None
            if published is None:
                losses += 1
                logger.warning("the worker that had %s %s; another takes it over", lease.job[2].label,
                               "is lost" if in_time else f"has not answered for {LEASE_SECONDS:.0f} s")
                if losses > LOSSES:
                    raise self._lost()
                idle.append(self._replace(lease.actor))
                waiting.append(lease.job)
                continue
            losses = 0
            idle.append(lease.actor)
            yield published

    def _next(self, running: Mapping[Any, _Lease]) -> tuple[Any, bool]:
        """Wait until a worker has answered or is lost. Return its reference, and whether this was within its lease."""
        import ray

        oldest = min(running, key=lambda reference: running[reference].since)
        left = running[oldest].since + LEASE_SECONDS - time.monotonic()
        ready, _ = ray.wait(list(running), num_returns=1, timeout=max(0.0, left))
        return (ready[0], True) if ready else (oldest, False)

    def _replace(self, actor: Any) -> Any:
        import ray

        ray.kill(actor)
        self._actors.remove(actor)
        self._actors.append(self._start())
        return self._actors[-1]

    def _lost(self) -> ClusterError:
        return ClusterError(f"more than {LOSSES} workers in a row were lost, or did not answer for "
                            f"{LEASE_SECONDS:.0f} s", where="--workers",
                            fix="look for a lack of memory on the nodes; what was answered is kept: give the command "
                                "again, with fewer workers")

    def close(self) -> None:
        """End the workers."""
        import ray

        for actor in self._actors:
            ray.kill(actor)


def _received(reference: Any) -> Published | None:
    """Return what a worker published; None if the worker is lost."""
    import ray

    try:
        published: Published = ray.get(reference)
    except ray.exceptions.RayActorError as error:
        _raise_cause(error)
        return None
    return published


def _raise_cause(error: BaseException) -> None:
    """Raise the error of a user that ended an actor's construction, if there is one."""
    from tidewheel.errors import TidewheelError, root_cause

    cause = root_cause(error)
    if isinstance(cause, TidewheelError):
        raise cause
