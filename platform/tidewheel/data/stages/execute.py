"""Units on Ray Data: one streaming execution a stage, and shuffles as keyed repartitions.

The only module of the data room, with its settings in `ray_data`, that talks to Ray. A stage hands over pure functions;
whatever Ray does with them (order, retries, which node), the same units are published.
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
    """One unit to do: where, and what it needs, as JSON values and `Stamp`s."""

    output: str
    unit: Unit
    inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The pipeline's output."""
        return store(self.output)

    def writer(self) -> UnitWriter:
        """Collects the unit's files."""
        return UnitWriter(self.output, self.unit)


@dataclass(frozen=True)
class Hop:
    """A shuffle and what follows it: rows with one value of the int32 column `key` come together in `reduce`.

    `reduce(number, rows)` gives rows of `schema` for the next hop; that of the last hop, without a schema, gives the
    `Published` unit `number`, or None when that is published already. It must not care about the order of its rows.
    """

    key: str
    reduce: Callable[[int, pa.Table], Any]
    schema: pa.Schema | None = None


@dataclass
class Finished:
    """The units of a stage in order, how many of them were there before, and the wall time."""

    units: list[Published]
    reused: int
    seconds: float


@dataclass
class Runner:
    """Completes stages: looks up what is published, executes the rest, tells of progress."""

    output: str
    on_progress: OnProgress | None = None
    verify: bool = False
    """Read what is published, too, and do again what is damaged."""
    completed: list[str] = field(default_factory=list)
    """Manifests of the units of all stages so far."""

    def complete(self, stage: str, tasks: Sequence[Task], execute: Callable[[list[Task]], Iterator[Published]],
                 note: str = "", follow: Callable[[Mapping[str, Published]], None] | None = None) -> Finished:
        """Every unit of `tasks`, published. `execute` gets the missing ones, and may leave out none; `follow` gets
        those that are published, by key, at first and again whenever one more is."""
        began = time.monotonic()
        found = lookup(store(self.output), [task.unit for task in tasks], verify=self.verify)
        reused, total = len(found), len(tasks)
        self.tell(stage, reused, total, f"{reused} there already" if reused else note)
        if follow is not None:
            follow(found)
        missing = [task for task in tasks if task.unit.key not in found]
        if missing:
            wanted = {task.unit.key for task in missing}
            seen: set[str] = set()
            documents = 0
            for entry in execute(missing):
                assert entry.unit.key in wanted, f"{stage}: a unit that was not asked for: {entry.unit}"
                assert entry.unit.key not in seen, f"{stage}: unit {entry.unit.label} came twice; a shuffle split it"
                seen.add(entry.unit.key)
                found[entry.unit.key] = entry
                documents += entry.summary.get("records", entry.summary.get("documents_in", 0))
                if follow is not None:
                    follow(found)
                self.tell(stage, len(found), total, _pace(note, documents, time.monotonic() - began))
        units = [found[task.unit.key] for task in tasks]
        self.completed += [unit.unit.manifest_key for unit in units]
        return Finished(units, reused, round(time.monotonic() - began, 3))

    def tidy(self, folder: str, units: Sequence[Published]) -> None:
        """Remove from a shared folder what earlier inputs or recipes left there: files of no unit of `units`."""
        place = store(self.output)
        kept = {stamp.key for unit in units for stamp in unit.files.values()}
        for found in place.list(folder):
            if found.key not in kept:
                place.delete(found.key)

    def tell(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Progress of a stage, in units."""
        if self.on_progress is not None:
            self.on_progress(stage, done, total, note)


def _pace(note: str, documents: int, seconds: float) -> str:
    """What stands behind the bar: the stage's note, documents done and documents a second."""
    pace = f"{documents:,} documents, {documents / max(seconds, 1e-3):,.0f}/s" if documents else ""
    return "; ".join(filter(None, (note, pace)))


def map_units(tasks: Sequence[Task], work: Callable[[Task], Published]) -> Iterator[Published]:
    """Do independent units, in any order."""
    yield from _results(tasks, lambda dataset: dataset.map_batches(
        functools.partial(_do, work), batch_format="pyarrow", batch_size=None))


def shuffle_units(tasks: Sequence[Task], read: Callable[[Task], Iterable[pa.Table]], schema: pa.Schema,
                  hops: Sequence[Hop], partitions: int) -> Iterator[Published]:
    """Read rows of `schema` task by task, shuffle them through `hops`; the last one publishes units.

    Partition numbers without any row publish nothing: the caller sees to them.
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
    """Ray may put several of our partitions into one block, by its own hash: take them one at a time."""
    found: list[Any] = []
    if table.num_rows:
        if len(table[hop.key].unique()) > 1:
            table = table.sort_by(hop.key)
        numbers = table[hop.key].to_numpy()
        bounds = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        for first, last in itertools.pairwise(bounds):
            found.append(hop.reduce(int(numbers[first]), table.slice(first, last - first)))
    if hop.schema is None:
        return _table([unit for unit in found if unit is not None])
    return pa.concat_tables([hop.schema.empty_table(), *(rows.cast(hop.schema) for rows in found)])


def _table(units: Sequence[Published]) -> pa.Table:
    return pa.table([pa.array([unit.to_json() for unit in units], pa.string()),
                     pa.array([json.dumps(unit.costs) for unit in units], pa.string())], schema=_RESULT)


def units_of(table: pa.Table) -> Iterator[Published]:
    """Yield the units in what `_do` or `_reduce` gave."""
    rows = zip(table["published"].to_pylist(), table["costs"].to_pylist(), strict=True) if table.num_rows else ()
    for published, costs in rows:
        yield replace(Published.from_json(published), costs={name: Cost(*cost) for name, cost in
                                                             json.loads(costs).items()})


def _results(tasks: Sequence[Task], chain: Callable[[Any], Any], partitions: int = 1) -> Iterator[Published]:
    import ray.data

    with settings(partitions):  # from the start: a dataset keeps the settings it was made under
        dataset = chain(ray.data.from_arrow([pa.table({"task": [_encode(task)]}) for task in tasks]))
        try:
            for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                yield from units_of(table)
        except Exception as error:
            cause = root_cause(error)
            if cause is error:
                raise
            raise cause from None  # what a person can mend is told without Ray's traces


def _encode(task: Task) -> str:
    unit = task.unit
    return json.dumps({"output": task.output, "unit": [unit.stage, unit.label, unit.key, unit.number],
                       "inputs": task.inputs}, default=_stamp)


def _stamp(value: Any) -> Any:
    if isinstance(value, Stamp):
        return {"_stamp": [value.key, value.bytes, value.hash]}
    raise TypeError(type(value).__name__)


def _decode(text: str) -> Task:
    values = json.loads(text, object_hook=lambda found: Stamp(*found["_stamp"]) if "_stamp" in found else found)
    return Task(values["output"], Unit(*values["unit"]), values["inputs"])
