"""Rewrite a partition, for stages that edit documents."""

from __future__ import annotations

import contextlib
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import document
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.stage import UnitWriter, ipc_stream
from tidewheel.data.stages import keys
from tidewheel.data.stages.execute import Task
from tidewheel.data.stages.partition import load_keys
from tidewheel.versions import Version

VERSION = Version("rewrite", uses=(keys.VERSION, document.VERSION))
_BATCH_ROWS = 8192


class Rewriter:
    """Writer of new `documents` and `keys` of one partition, which `drops.after` puts in place of the old ones.

    Use it as a context manager around a loop over `load_documents`: add the remaining documents of each table, then
    publish the unit with `writer`.

    Args:
        task: task with the inputs of the partition, and `minhash` (`keys.minhash_settings`).
    """

    def __init__(self, task: Task) -> None:
        self.writer: UnitWriter = task.writer()
        self._minhash = task.inputs["minhash"]
        self._before = load_keys(task.store, task.inputs)
        self._keys: list[pa.Table] = []
        self._closing = contextlib.ExitStack()
        self._key = task.unit.file_key("documents")

    def __enter__(self) -> Rewriter:
        self._sink = self._closing.enter_context(self.writer.store.writer(self._key))
        self._stream = self._closing.enter_context(ipc_stream(self._sink, DOCUMENT_SCHEMA))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self._closing.__exit__(kind, error, trace)
        if error is None:
            self.writer.add("documents", self._sink.stamp)
            self.writer.table("keys", pa.concat_tables([self._before.slice(0, 0), *self._keys]))

    def add(self, documents: pa.Table, changed: np.ndarray, quality: np.ndarray | None = None) -> None:
        """Add the next documents, in order of id.

        Args:
            documents: n rows with the columns of `DOCUMENT_SCHEMA` and their current values.
            changed: whether each text has changed, bool [n].
            quality: new values of the key column, float32 [n]; None keeps the old ones.
        """
        self._stream.write_table(documents.select(DOCUMENT_SCHEMA.names).cast(DOCUMENT_SCHEMA), _BATCH_ROWS)
        indices = pc.index_in(documents["id"], value_set=self._before["id"].combine_chunks())
        rows = self._before.take(indices)
        if quality is not None:
            rows = rows.set_column(rows.schema.get_field_index("quality"), rows.schema.field("quality"),
                                   pa.array(quality, pa.float32()))
        if changed.any():
            rows = self._recomputed(rows, documents["text"], changed)
        self._keys.append(rows)

    def _recomputed(self, rows: pa.Table, texts: pa.ChunkedArray, changed: np.ndarray) -> pa.Table:
        """Return the key rows; where a text has changed, compute the columns that follow from it again."""
        edited = pa.chunked_array(texts.filter(pa.array(changed)).chunks, pa.large_string()).combine_chunks()
        recomputed = {**keys.columns(edited, self._minhash), "head": keys.heads(edited)}
        for name, values in recomputed.items():
            column = rows.schema.get_field_index(name)
            old = rows.column(column).combine_chunks()
            rows = rows.set_column(column, rows.schema.field(column), _replaced(old, changed, values))
        return rows


def _replaced(old: pa.Array, changed: np.ndarray, values: pa.Array) -> pa.Array:
    """Return `old` with `values` where `changed` is true."""
    order = np.arange(len(old))
    order[changed] = len(old) + np.arange(len(values))
    return pa.concat_arrays([old, values.cast(old.type)]).take(pa.array(order))
