"""Steps as Ray tasks: each runs in its own process, so that one that dies ends no other.

Steps that start workers themselves run on the driver's node and reserve nothing. Functions run on any node with free
CPUs. All tasks end with the driver.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tidewheel.autoscaler import can_grow
from tidewheel.config import build
from tidewheel.placement import matches
from tidewheel.workflow.graph import Node
from tidewheel.workflow.kinds import KINDS
from tidewheel.workflow.records import StepLog
from tidewheel.workflow.step_kind import Task


def execute(task: Task, output: str, node_id: str) -> dict[str, Any]:
    """Run one step in this process, and return its artifact.

    Args:
        task: the step.
        output: URI of the workflow, below which its log is.
        node_id: the step's id.
    """
    log = StepLog(output, node_id)
    log("started")
    try:
        artifact: dict[str, Any] = KINDS[task.entry["kind"]].run(task, log)
    except BaseException as error:
        log.failed(error)
        raise
    log("done")
    log.flush()
    return artifact


class RayLauncher:
    """`schedule.Launcher` on the Ray cluster that this process is connected to.

    Args:
        nodes: the graph.
        input: URI that relative paths are below.
        output: URI of the workflow.
        functions: functions of `Call` steps by step name, for those that cannot be imported.
    """

    def __init__(self, nodes: Sequence[Node], *, input: str, output: str,
                 functions: Mapping[str, Callable[..., object]] | None = None) -> None:
        self._places = {node.name: node.place for node in nodes}
        self._input = input
        self._output = output
        self._functions = dict(functions or {})
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()

    def task(self, node: Node, max_workers: int | None) -> Task:
        """Return what the step's process gets.

        Args:
            node: the step.
            max_workers: a training's share of the cluster; None: unlimited.
        """
        needs = {role: self._places[need] for role, need in node.needs.items()}
        return Task(node.entry, node.place, node.key, self._input, needs, max_workers,
                    self._functions.get(node.name))

    def launch(self, node: Node, max_workers: int | None) -> dict[str, Any]:
        """Run a step to its end, and return its artifact; see `Launcher.launch`."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {"max_retries": 0, "name": node.id, "num_cpus": node.entry.get("cpus", 1)}
        if node.kind != "function":
            on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            options |= {"num_cpus": 0, "scheduling_strategy": on_this_node}
        remote: Any = ray.remote(execute)
        reference = remote.options(**options).remote(self.task(node, max_workers), self._output, node.id)
        with self._lock:
            self._tasks[node.name] = reference
        try:
            artifact: dict[str, Any] = ray.get(reference)
            return artifact
        finally:
            with self._lock:
                self._tasks.pop(node.name, None)

    def interrupt(self, running: Sequence[Node]) -> None:
        """Let trainings save, then cancel the tasks of these steps."""
        import ray

        from tidewheel.elastic.leave import save_now

        trainings = [node for node in running if node.kind == "train"]
        if trainings:
            with ThreadPoolExecutor(len(trainings)) as pool:
                list(pool.map(lambda node: save_now(node.place), trainings))
        with self._lock:
            references = [self._tasks[node.name] for node in running if node.name in self._tasks]
        for reference in references:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it has ended in the meantime
                ray.cancel(reference, force=False, recursive=True)

    def places(self, node: Node, *, spare_cpus: float = 0) -> int | None:
        """Return the number of workers that fit on the cluster now; None where it can grow; see `Launcher.places`."""
        from tidewheel.elastic import layout, nodes
        from tidewheel.train.config import TrainConfig

        if can_grow():
            return None
        elastic = build(TrainConfig, node.entry["config"]).elastic
        usable = nodes.usable()
        matching = [node.resources for node in usable if matches(elastic.placement.selector, node.labels)]
        slots = layout.slots(matching, elastic.needs)
        free_cpus = sum(node.resources.get("CPU", 0.0) for node in usable) - slots * elastic.cpus_per_worker
        missing_cpus = max(0.0, spare_cpus - free_cpus)
        return max(0, slots - math.ceil(missing_cpus / elastic.cpus_per_worker))
