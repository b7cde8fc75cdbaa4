"""Run units on Ray Data: a streaming execution for each stage, and shuffles as keyed repartitions.

Only this module and `ray_data`, which has its settings, use Ray. A stage passes pure functions, so the published units
do not depend on Ray's order, retries or placement.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel.data.stage import Cost, Published, Unit, UnitWriter, lookup
from tidewheel.data.stages.ray_data import settings
from tidewheel.errors import root_cause
from tidewheel.storage import Stamp, Store, store

OnProgress = Callable[[str, int, int, str], None]
_RESULT = pa.schema([pa.field("published", pa.string()), pa.field("costs", pa.string())])


@dataclass(frozen=True)
class Task:
    """One unit of work.

    Args:
        output: URI of the pipeline's output.
        unit: the unit.
        inputs: arguments of the work, as JSON values and `Stamp`s.
    """

    output: str
    unit: Unit
    inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The pipeline's output."""
        return store(self.output)

    def writer(self) -> UnitWriter:
        """Return a writer for the unit's files."""
        return UnitWriter(self.output, self.unit)


@dataclass(frozen=True)
class Hop:
    """A shuffle and the reduction after it.

    Args:
        key: int32 column; all rows with the same value go to one call of `reduce`.
        reduce: called with (value, rows), whose order it must not depend on. It returns rows of `schema` for the next
            hop. In the last hop it returns the `Published` unit of that number, or None if that is published already.
        schema: schema of the returned rows; None for the last hop.
    """

    key: str
    reduce: Callable[[int, pa.Table], Any]
    schema: pa.Schema | None = None


@dataclass
class Finished:
    """Result of a stage.

    Args:
        units: the units, in order.
        reused: number of units that had been published before.
        seconds: wall time.
    """

    units: list[Published]
    reused: int
    seconds: float


@dataclass
class Runner:
    """Runner of stages: it looks up published units, executes the missing ones, and reports progress.

    Args:
        output: URI of the pipeline's output.
        on_progress: called with (stage, finished units, all units, note).
        verify: read published units and make damaged ones again.
        completed: keys of the manifests of all units so far.
    """

    output: str
    on_progress: OnProgress | None = None
    verify: bool = False
    completed: list[str] = field(default_factory=list)

    def complete(self, stage: str, tasks: Sequence[Task], execute: Callable[[list[Task]], Iterator[Published]],
                 note: str = "", follow: Callable[[Mapping[str, Published]], None] | None = None) -> Finished:
        """Publish every unit of a stage.

        Args:
            stage: name of the stage.
            tasks: all tasks of the stage.
            execute: yields the units of the tasks it gets, which are the missing ones; it must publish all of them.
            note: text for the progress bar.
            follow: called with the published units by key, first at the beginning and then after each new unit.
        """
        began = time.monotonic()
        published = lookup(store(self.output), [task.unit for task in tasks], verify=self.verify)
        reused = len(published)
        total = len(tasks)
        self.report(stage, reused, total, f"{reused} there already" if reused else note)
        if follow is not None:
            follow(published)
        missing = [task for task in tasks if task.unit.key not in published]
        if missing:
            requested = {task.unit.key for task in missing}
            seen: set[str] = set()
            documents = 0
            for entry in execute(missing):
                assert entry.unit.key in requested, f"{stage}: a unit that was not requested: {entry.unit}"
                assert entry.unit.key not in seen, f"{stage}: unit {entry.unit.label} came twice; a shuffle split it"
                seen.add(entry.unit.key)
                published[entry.unit.key] = entry
                documents += entry.summary.get("records", entry.summary.get("documents_in", 0))
                if follow is not None:
                    follow(published)
                self.report(stage, len(published), total, _pace(note, documents, time.monotonic() - began))
        units = [published[task.unit.key] for task in tasks]
        self.completed += [unit.unit.manifest_key for unit in units]
        return Finished(units, reused, round(time.monotonic() - began, 3))

    def tidy(self, folder: str, units: Sequence[Published]) -> None:
        """Remove files from a shared folder that belong to no unit of `units`: earlier inputs or recipes left them."""
        output = store(self.output)
        kept = {stamp.key for unit in units for stamp in unit.files.values()}
        for file in output.list(folder):
            if file.key not in kept:
                output.delete(file.key)

    def report(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Report the progress of a stage.

        Args:
            stage: name of the stage.
            done: finished units.
            total: all units.
            note: text for the progress bar.
        """
        if self.on_progress is not None:
            self.on_progress(stage, done, total, note)


def _pace(note: str, documents: int, seconds: float) -> str:
    """Return the text beside the progress bar: the stage's note, finished documents, and documents per second."""
    pace = f"{documents:,} documents, {documents / max(seconds, 1e-3):,.0f}/s" if documents else ""
    return "; ".join(filter(None, (note, pace)))


def map_units(tasks: Sequence[Task], work: Callable[[Task], Published]) -> Iterator[Published]:
    """Run independent tasks, and yield their units in any order."""
    yield from _results(tasks, lambda dataset: dataset.map_batches(
        functools.partial(_do, work), batch_format="pyarrow", batch_size=None))


def shuffle_units(tasks: Sequence[Task], read: Callable[[Task], Iterable[pa.Table]], schema: pa.Schema,
                  hops: Sequence[Hop], partitions: int) -> Iterator[Published]:
    """Read rows and shuffle them through hops; yield the units that the last hop publishes.

    A partition without rows publishes nothing; the caller handles it.

    Args:
        tasks: tasks to read.
        read: yields the rows of a task.
        schema: schema of these rows.
        hops: the shuffles, in order.
        partitions: number of partitions of each shuffle.
    """
    def chain(dataset: Any) -> Any:
        dataset = dataset.map_batches(functools.partial(_read, read, schema), batch_format="pyarrow", batch_size=None)
        for hop in hops:
            dataset = dataset.repartition(partitions, keys=[hop.key])
            dataset = dataset.map_batches(functools.partial(_reduce, hop), batch_format="pyarrow", batch_size=None)
        return dataset

    yield from _results(tasks, chain, partitions)


def _do(work: Callable[[Task], Published], table: pa.Table) -> pa.Table:
    return _table([work(_decode(text)) for text in table["task"].to_pylist()])


def _read(read: Callable[[Task], Iterable[pa.Table]], schema: pa.Schema, table: pa.Table) -> Iterator[pa.Table]:
    for text in table["task"].to_pylist():
        for rows in read(_decode(text)):
            if rows.num_rows:
                yield rows.cast(schema)
    yield schema.empty_table()


def _reduce(hop: Hop, table: pa.Table) -> pa.Table:
    """Reduce each partition by itself: Ray's own hash may put several of our partitions into one block."""
    results: list[Any] = []
    if table.num_rows:
        if len(table[hop.key].unique()) > 1:
            table = table.sort_by(hop.key)
        numbers = table[hop.key].to_numpy()
        bounds = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        for first, last in itertools.pairwise(bounds):
            results.append(hop.reduce(int(numbers[first]), table.slice(first, last - first)))
    if hop.schema is None:
        return _table([unit for unit in results if unit is not None])
    return pa.concat_tables([hop.schema.empty_table(), *(rows.cast(hop.schema) for rows in results)])


def _table(units: Sequence[Published]) -> pa.Table:
    return pa.table([pa.array([unit.to_json() for unit in units], pa.string()),
                     pa.array([json.dumps(unit.costs) for unit in units], pa.string())], schema=_RESULT)


def units_of(table: pa.Table) -> Iterator[Published]:
    """Yield the units in a table that `_do` or `_reduce` returned."""
    rows = zip(table["published"].to_pylist(), table["costs"].to_pylist(), strict=True) if table.num_rows else ()
    for published, costs in rows:
        yield replace(Published.from_json(published), costs={name: Cost(*cost) for name, cost in
                                                             json.loads(costs).items()})


def _results(tasks: Sequence[Task], chain: Callable[[Any], Any], partitions: int = 1) -> Iterator[Published]:
    import ray.data

    with settings(partitions):  # a dataset keeps the settings under which it was created
        dataset = chain(ray.data.from_arrow([pa.table({"task": [_encode(task)]}) for task in tasks]))
        try:
            for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                yield from units_of(table)
        except Exception as error:
            cause = root_cause(error)
            if cause is error:
                raise
            raise cause from None  # a user's error is shown without Ray's traces


def _encode(task: Task) -> str:
    unit = task.unit
    return json.dumps({"output": task.output, "unit": [unit.stage, unit.label, unit.key, unit.number],
                       "inputs": task.inputs}, default=_stamp)


def _stamp(value: Any) -> Any:
    if isinstance(value, Stamp):
        return {"_stamp": [value.key, value.bytes, value.hash]}
    raise TypeError(type(value).__name__)


def _decode(text: str) -> Task:
    values = json.loads(text, object_hook=lambda value: Stamp(*value["_stamp"]) if "_stamp" in value else value)
    return Task(values["output"], Unit(*values["unit"]), values["inputs"])
