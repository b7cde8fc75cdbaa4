"""Ray Data's settings while the pipeline's stages run: quiet, shuffles in the workers there are, and on which nodes."""

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
"""Input that the map side of a shuffle takes at once: 64 MiB, which every CPU gets some of and whose copies reuse
memory (Ray's default of 1 GiB is one task up to there, and takes twice the CPU time). A partition holds as much, so
beyond 256 partitions it grows with them: maps x partitions objects are a load of their own."""
_SELECTOR: contextvars.ContextVar[Selector] = contextvars.ContextVar("selector", default=MappingProxyType({}))


@contextlib.contextmanager
def placed(selector: Selector) -> Iterator[None]:
    """Tasks of the block run on nodes that match `selector`."""
    before = _SELECTOR.set(selector)
    try:
        yield
    finally:
        _SELECTOR.reset(before)


@contextlib.contextmanager
def settings(partitions: int) -> Iterator[None]:
    """Ray Data as the pipeline needs it, and silent: progress is ours to show, errors ours to tell.

    Args:
        partitions: of the shuffles in the block.

    Raises:
        ClusterError: no node is one of those that `placed` asks for.
    """
    from ray.data import DataContext
    from ray.data.context import ShuffleStrategy

    selector = dict(_SELECTOR.get())
    if selector:
        _require_nodes(selector)
    context = DataContext.get_current()
    options = copy.copy(context.execution_options)
    options.label_selector = selector or options.label_selector
    wanted = {"execution_options": options, "enable_progress_bars": False, "print_on_execution_start": False,
              "shuffle_strategy": ShuffleStrategy.SHUFFLE_V2, "shuffle_compression": "lz4",
              "shuffle_input_batch_bytes": min(SHUFFLE_MOST, SHUFFLE_BYTES * max(1, partitions // SHUFFLE_MAPS)),
              "memory_usage_poll_interval_s": None,  # it walks the page tables of every worker each second
              "raise_original_map_exception": True}  # wrapped, ours would lose its parts on the way here
    before = {name: getattr(context, name) for name in wanted}
    logger = logging.getLogger("ray.data")
    level = logger.level
    for name, value in wanted.items():
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
    """Shuffles in the worker processes that are there.

    Ray gives each side of a shuffle an environment of its own and with it new processes, so that object store pages do
    not count as memory of other tasks'; starting those takes longer than most shuffles, and on a node without room for
    idle ones that is at each stage.
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
    """Tasks of shuffles on nodes that match: Ray gives them no `label_selector`, unlike all other tasks."""
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
    """A remote function whose options always have the selector."""

    task: Any
    selector: dict[str, str]

    def options(self, **given: Any) -> Any:
        return self.task.options(**given, label_selector=self.selector)


def _require_nodes(selector: Selector) -> None:
    """Say so when nothing could ever run, rather than wait."""
    import ray

    rows = [row for row in ray.nodes() if row["Alive"]]
    if any(row["Resources"].get("CPU") and matches(selector, row["Labels"] or {}) for row in rows):
        return
    if not can_grow(START_SECONDS):
        groups = sorted({(row["Labels"] or {}).get(GROUP_LABEL, "none") for row in rows})
        raise ClusterError(f"no node{with_labels(selector)} has CPUs; groups of the nodes there are: "
                           f"{', '.join(groups)}", where="placement", mend="correct placement, or add such nodes")
