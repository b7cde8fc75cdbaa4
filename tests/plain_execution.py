"""Run stages without Ray in this process: the same functions over the same tasks, in an order given by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from ray import cloudpickle

from tidewheel.data.stage import Published
from tidewheel.data.stages import execute


class Blocks:
    """A stand-in for the methods of `ray.data.Dataset` that `execute` uses."""

    def __init__(self, blocks: Iterable[pa.Table], seed: int, functions: list[Callable[[pa.Table], Any]]) -> None:
        self.blocks = list(blocks)
        self.seed = seed
        self.functions = functions
        """All mapped functions, in order."""

    def map_batches(self, work: Callable[[pa.Table], Any], **_: Any) -> Blocks:
        self.functions.append(work)
        blocks: list[pa.Table] = []
        for block in self.blocks:
            output = work(block)
            blocks += [output] if isinstance(output, pa.Table) else list(output)
        return Blocks(blocks, self.seed, self.functions)

    def repartition(self, partitions: int, keys: Sequence[str]) -> Blocks:
        """Put all rows of a key into one block and several keys into a block, with rows in random order."""
        generator = random.Random(self.seed)
        rows = pa.concat_tables(self.blocks)
        order = list(range(len(rows)))
        generator.shuffle(order)
        rows = rows.take(pa.array(order, pa.int64()))
        count = max(1, partitions // 2)
        indices = pa.array([hash((value, self.seed)) % count for value in rows[keys[0]].to_pylist()], pa.int64())
        return Blocks([rows.filter(pa.compute.equal(indices, index)) for index in range(count)],
                      self.seed, self.functions)


def without_ray(seed: int = 0) -> Any:
    """Return a context in which `map_units` and `shuffle_units` work in this process."""
    def results(tasks: Sequence[execute.Task], chain: Callable[[Any], Blocks],
                partitions: int = 1) -> Iterator[Published]:
        tasks = list(tasks)
        random.Random(seed).shuffle(tasks)
        functions: list[Callable[[pa.Table], Any]] = []
        dataset = Blocks([pa.table({"task": [execute._encode(task)]}) for task in tasks], seed, functions)
        blocks = chain(dataset).blocks
        planned = [cloudpickle.dumps(function) for function in functions]
        for block in blocks:
            for unit in execute.units_of(block):
                yield unit
                # Ray pickles the functions in another thread whenever it submits a task
                assert [cloudpickle.dumps(function) for function in functions] == planned, \
                    "a stage changed values that its functions refer to while they were in use"

    return patch.object(execute, "_results", results)
