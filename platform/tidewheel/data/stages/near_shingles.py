"""Shingle sets of some documents of a partition, for comparisons that signatures cannot decide."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data.dedup import minhash
from tidewheel.data.stages.execute import Task
from tidewheel.data.stages.partition import load_documents


def sets_of(task: Task, ids: pa.Array, ngram: int, unit: minhash.Unit) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (id, shingle set) of the documents of a partition that are among `ids`.

    Args:
        task: the partition.
        ids: ids of documents.
        ngram: units in a shingle.
        unit: what a shingle consists of: words or characters.
    """
    if not len(ids):
        return
    for table in load_documents(task.store, task.inputs):
        table = table.filter(pc.is_in(table["id"], value_set=ids))
        if len(table):
            yield from zip(table["id"].to_pylist(), minhash.shingle_sets(table["text"], ngram=ngram, unit=unit),
                           strict=True)
