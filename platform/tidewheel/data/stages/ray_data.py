"""Settings of Ray Data while stages run: no output, shuffles in existing worker processes, tasks on selected nodes."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tidewheel.autoscaler import START_SECONDS, can_grow
from tidewheel.data.stages.ray_data_actors import without_idle_actors
from tidewheel.errors import ClusterError
from tidewheel.placement import GROUP_LABEL, Selector, matches, with_labels

_SILENT = logging.CRITICAL + 1
SHUFFLE_BYTES, SHUFFLE_MOST, SHUFFLE_MAPS = 64 << 20, 1 << 30, 256
"""Input of a map task of a shuffle, in bytes. With 64 MiB every CPU gets work and copies reuse memory; Ray's default of
1 GiB runs smaller inputs as one task and takes twice the CPU time. A partition is as large, so beyond `SHUFFLE_MAPS`
partitions the size grows with their number (up to `SHUFFLE_MOST`), to bound the maps x partitions objects."""
_SELECTOR: contextvars.ContextVar[Selector] = contextvars.ContextVar("selector", default=MappingProxyType({}))


@contextlib.contextmanager
def placed(selector: Selector) -> Iterator[None]:
    """Run the tasks of the block on nodes that match `selector`."""
    before = _SELECTOR.set(selector)
    try:
        yield
    finally:
        _SELECTOR.reset(before)


@contextlib.contextmanager
def settings(partitions: int) -> Iterator[None]:
    """Configure Ray Data for the pipeline, without its own output: the pipeline shows progress and errors itself.

    Args:
        partitions: number of partitions of the shuffles in the block.

    Raises:
        ClusterError: no node matches the selector of `placed`.
    """
    from ray.data import DataContext
    from ray.data.context import ShuffleStrategy

    selector = dict(_SELECTOR.get())
    if selector:
        _require_nodes(selector)
    context = DataContext.get_current()
    options = copy.copy(context.execution_options)
    options.label_selector = selector or options.label_selector
    values = {"execution_options": options, "enable_progress_bars": False, "print_on_execution_start": False,
              "shuffle_strategy": ShuffleStrategy.SHUFFLE_V2, "shuffle_compression": "lz4",
              "shuffle_input_batch_bytes": min(SHUFFLE_MOST, SHUFFLE_BYTES * max(1, partitions // SHUFFLE_MAPS)),
              "memory_usage_poll_interval_s": None,  # polling walks the page tables of every worker each second
              "raise_original_map_exception": True}  # a wrapped error of ours would lose its fields
    before = {name: getattr(context, name) for name in values}
    logger = logging.getLogger("ray.data")
    level = logger.level
    for name, value in values.items():
        setattr(context, name, value)
    logger.setLevel(_SILENT)
    try:
        with _same_workers(), _placed_shuffles(selector), without_idle_actors():
            yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            setattr(context, name, value)


@contextlib.contextmanager
def _same_workers() -> Iterator[None]:
    """Run shuffles in existing worker processes.

    Ray gives each side of a shuffle its own environment, and with it new processes, so that object store pages do not
    count as the memory of other tasks. Starting these processes takes longer than most shuffles. On a node without
    room for idle processes they start again in each stage.
    """
    from ray.data._internal.execution.operators import hash_shuffle_v2
    from ray.data._internal.execution.operators.shuffle_operators import shuffle_reduce_operator

    sides = [hash_shuffle_v2._SHUFFLE_MAP_RUNTIME_ENV, shuffle_reduce_operator._SHUFFLE_REDUCE_RUNTIME_ENV]
    before = [side["env_vars"] for side in sides]
    for side in sides:
        side["env_vars"] = {}
    try:
        yield
    finally:
        for side, variables in zip(sides, before):
            side["env_vars"] = variables


@contextlib.contextmanager
def _placed_shuffles(selector: Selector) -> Iterator[None]:
    """Run shuffle tasks on matching nodes: Ray passes `label_selector` to all other tasks, but not to these."""
    from ray.data._internal.execution.operators.shuffle_operators import shuffle_map_operator, shuffle_reduce_operator

    if not selector:
        yield
        return
    sides = [(shuffle_map_operator, "_shuffle_map_task"), (shuffle_reduce_operator, "_shuffle_reduce_task")]
    before = [getattr(module, name) for module, name in sides]
    for (module, name), task in zip(sides, before):
        setattr(module, name, _Placed(task, dict(selector)))
    try:
        yield
    finally:
        for (module, name), task in zip(sides, before):
            setattr(module, name, task)


@dataclass(frozen=True)
class _Placed:
    """Remote function that always runs with the selector."""

    task: Any
    selector: dict[str, str]

    def options(self, **given: Any) -> Any:
        return self.task.options(**given, label_selector=self.selector)


def _require_nodes(selector: Selector) -> None:
    """Raise ClusterError if no node could ever run a task, instead of waiting for one."""
    import ray

    rows = [row for row in ray.nodes() if row["Alive"]]
    if any(row["Resources"].get("CPU") and matches(selector, row["Labels"] or {}) for row in rows):
        return
    if not can_grow(START_SECONDS):
        groups = sorted({(row["Labels"] or {}).get(GROUP_LABEL, "none") for row in rows})
        raise ClusterError(f"no node{with_labels(selector)} has CPUs; the nodes belong to the groups: "
                           f"{', '.join(groups)}", where="placement", fix="correct placement, or add such nodes")
