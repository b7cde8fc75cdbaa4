"""Read Parquet and Arrow files: a row is a record, its columns are the fields.

Text columns are read as bytes and decoded row by row, so that a bad value affects only its row. Nested and binary
columns are skipped unless a field is mapped to them. The size of a row is computed before it is decoded, because a few
bytes of a dictionary may stand for any number of large values. Memory is bounded by `BATCH_BYTES` of decoded values,
one row of `max_record_bytes`, and one page of Parquet or one record batch of Arrow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidewheel.data.compression import first_line
from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers.columns_size import Sizes, largest_entry, row_bytes, size_of
from tidewheel.data.readers.packed import file_errors
from tidewheel.data.readers.record import Location, Record, document_fields, message_fields, record
from tidewheel.storage import Store

BATCH_BYTES = 16 << 20
"""Maximum size of the decoded values that are read from a Parquet file at once, unless a single row has more."""
_BATCH_ROWS = 1024
_LOOK_BYTES = 1 << 20  # reading a column's dictionary must not fetch the whole column
_FILE_MAGIC = b"ARROW1"
_FAULTS = (OSError, pa.ArrowException, UnicodeDecodeError)


@dataclass(frozen=True)
class Other:
    """A value that cannot be text, id or source, because its type is neither a string nor a whole number."""

    type: str


@dataclass(frozen=True)
class _Lost:
    """Rows in a damaged part of the file."""

    first: int
    rows: int
    detail: str


def records(store: Store, key: str, kind: str, config: ReadConfig, name: str, span: tuple[int, int] | None
            ) -> Iterator[Record | Bad]:
    """Yield the rows of a Parquet or Arrow file.

    A record's line is the number of its row from 1, its offset the same from 0. A damaged row group or batch is one bad
    record that counts for all of its rows.

    Args:
        store: the store of the file.
        key: its key there.
        kind: "parquet" or "arrow".
        config: the settings of `read`.
        name: what quarantine calls the file.
        span: row groups [first, last) of a Parquet file; None for the whole file.
    """
    named, nested = document_fields(config), message_fields(config)
    with file_errors(store, key), store.open(key) as stream:
        if store.size(key) == 0:
            return
        batches = _parquet(stream, named | nested, span) if kind == "parquet" else _arrow(stream)
        for item in batches:
            if isinstance(item, _Lost):
                yield _lost(item, name)
                continue
            first, batch = item
            try:
                columns = _columns(batch, named, nested)
            except MemoryError:
                raise
            except _FAULTS as error:
                yield _lost(_Lost(first, batch.num_rows, first_line(error)), name)
                continue
            for row in range(batch.num_rows):
                yield _row(columns, row, config, Location(name, first + row + 1, first + row))


def row_groups(store: Store, key: str, size: int) -> list[tuple[int, int]]:
    """Return ranges [first, last) of a Parquet file's row groups; [] if the file cannot be read.

    Args:
        store: the store of the file.
        key: its key there.
        size: approximate length of a range in bytes.
    """
    try:
        with store.open(key) as stream:
            metadata = pq.ParquetFile(stream).metadata
            sizes = [_compressed_bytes(metadata.row_group(group)) for group in range(metadata.num_row_groups)]
    except (FileNotFoundError, MemoryError):
        raise
    except _FAULTS:
        return []
    ranges: list[tuple[int, int]] = []
    first = 0
    total = 0
    for group, group_bytes in enumerate(sizes):
        if total and total + group_bytes > size:
            ranges.append((first, group))
            first = group
            total = 0
        total += group_bytes
    return [*ranges, (first, len(sizes))] if sizes else []


def _compressed_bytes(group: Any) -> int:
    return sum(group.column(index).total_compressed_size for index in range(group.num_columns))


def _lost(lost: _Lost, name: str) -> Bad:
    location = Location(name, lost.first + 1, lost.first)
    bad = location.bad("damaged_rows", b"", f"rows from {lost.first + 1}: {lost.detail}")
    return Bad(**{**bad.__dict__, "records": max(lost.rows, 1)})


def _parquet(stream: Any, named: set[str], span: tuple[int, int] | None
             ) -> Iterator[tuple[int, pa.RecordBatch] | _Lost]:
    """Yield (number of its first row, batch), one row group after another."""
    file = pq.ParquetFile(stream, page_checksum_verification=True)
    metadata = file.metadata
    columns = [field.name for field in file.schema_arrow if field.name in named or _is_plain(field.type)]
    paths = [file.schema.column(index).path for index in range(len(file.schema))]
    columns += sorted(name for name in named if "." in name and name not in columns
                      and any(_is_below(path, name) for path in paths))
    first, last = span or (0, metadata.num_row_groups)
    row = sum(metadata.row_group(group).num_rows for group in range(first))
    for group in range(first, last):
        end = row + metadata.row_group(group).num_rows
        try:
            for batch in _group_batches(stream, file, group, columns):
                yield row, batch
                row += batch.num_rows
        except (FileNotFoundError, MemoryError):
            raise
        except _FAULTS as error:
            yield _Lost(row, end - row, first_line(error))
        row = end


def _group_batches(stream: Any, file: pq.ParquetFile, group_index: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Return the batches of a row group, with so few rows each that their decoded size is bounded.

    Columns with one value per row are decoded; the largest value in the dictionary limits the number of rows. In a
    nested column a single row may repeat a value any number of times: if that could take too much memory, the column
    stays dictionary-encoded.
    """
    group = file.metadata.row_group(group_index)
    read = [index for index in range(group.num_columns) if _is_read(group.column(index), columns)]
    chunks = [group.column(index) for index in read]
    largest = {group.column(index).path_in_schema: _largest_value(stream, file, group_index, index) for index in read}
    repeated = [chunk.path_in_schema for chunk in chunks
                if chunk.path_in_schema not in columns and chunk.physical_type == "BYTE_ARRAY"
                and chunk.has_dictionary_page and largest[chunk.path_in_schema] * chunk.num_values > BATCH_BYTES]
    widest = sum(size for path, size in largest.items() if path not in repeated)
    average = group.total_byte_size // max(group.num_rows, 1)
    rows = max(1, min(_BATCH_ROWS, BATCH_BYTES // max(widest, average, 1)))
    if repeated:
        file = pq.ParquetFile(stream, metadata=file.metadata, page_checksum_verification=True, read_dictionary=repeated)
    return file.iter_batches(rows, row_groups=[group_index], columns=columns)


def _is_read(chunk: Any, columns: list[str]) -> bool:
    return any(_is_below(chunk.path_in_schema, name) for name in columns)


def _is_below(path: str, name: str) -> bool:
    """Return whether the column at `path` is the field `name` or a part of it."""
    return path == name or path.startswith(f"{name}.")


def _largest_value(stream: Any, file: pq.ParquetFile, group_index: int, index: int) -> int:
    """Return an upper bound for the decoded bytes of a value that takes fewer bytes in its page; 0 if there is none.

    The bound is the largest entry of the column's dictionary. In DELTA_BYTE_ARRAY a value may begin with the whole
    previous value, so the bound is the column's size in the row group.
    """
    chunk = file.metadata.row_group(group_index).column(index)
    path = chunk.path_in_schema
    if chunk.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return int(file.schema.column(index).length)
    if chunk.physical_type != "BYTE_ARRAY":
        return 0
    if "DELTA_BYTE_ARRAY" in chunk.encodings:
        return int(chunk.total_uncompressed_size)
    if not chunk.has_dictionary_page:
        return 0
    encoded = pq.ParquetFile(stream, metadata=file.metadata, page_checksum_verification=True, read_dictionary=[path],
                             buffer_size=_LOOK_BYTES)
    for batch in encoded.iter_batches(_BATCH_ROWS, row_groups=[group_index], columns=[path]):
        if size := max(map(largest_entry, batch.columns), default=0):
            return size
    return 0


def _arrow(stream: Any) -> Iterator[tuple[int, pa.RecordBatch] | _Lost]:
    """Yield (number of its first row, batch). Stop at a damaged batch: its rows cannot be counted."""
    head = stream.read(len(_FILE_MAGIC))
    stream.seek(0)
    row = 0
    if head == _FILE_MAGIC:
        file = pa.ipc.open_file(stream)
        batches = (file.get_batch(index) for index in range(file.num_record_batches))
    else:
        batches = iter(pa.ipc.open_stream(stream))
    while True:
        try:
            batch = next(batches, None)
        except (FileNotFoundError, MemoryError):
            raise
        except _FAULTS as error:
            yield _Lost(row, 1, first_line(error))
            return
        if batch is None:
            return
        yield row, batch
        row += batch.num_rows


def _is_plain(kind: pa.DataType) -> bool:
    types = pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(_is_string(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
                or types.is_decimal(kind) or types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind))


def _is_string(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


@dataclass(frozen=True)
class _Column:
    """A column of a batch that is decoded value by value."""

    values: pa.Array
    sizes: Sizes
    is_other: bool

    def value(self, row: int) -> Any:
        """Return the value of a row: a JSON value, a string as bytes, an `Other`, or None if it is missing."""
        scalar = self.values[row]
        if not scalar.is_valid:
            return None
        if self.is_other:
            return Other(str(self.values.type))
        value = scalar.as_py()
        if pa.types.is_floating(self.values.type):  # NaN is not JSON
            return float(value) if math.isfinite(value) else None
        return _without_nulls(value)

    def head(self, row: int, size: int) -> bytes:
        """Return the first bytes of a string."""
        scalar = self.values[row]
        if isinstance(scalar, pa.DictionaryScalar):
            scalar = scalar.value
        data = scalar.as_buffer() if scalar.is_valid and hasattr(scalar, "as_buffer") else None
        return data.slice(0, min(size, data.size)).to_pybytes() if data else b""


def _without_nulls(value: Any) -> Any:
    """Return a nested value without null fields. In a column every struct has the fields of all structs."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _columns(batch: pa.RecordBatch, named: set[str], nested: set[str]) -> dict[str, _Column]:
    """Return the columns to read, by name. The first of two columns with the same name counts."""
    columns: dict[str, _Column] = {}
    for index, field in enumerate(batch.schema):
        if field.name not in columns and (field.name in named or _is_plain(field.type)):
            columns[field.name] = _column(batch.column(index))
        elif field.name not in columns and field.name in nested:  # messages
            column = batch.column(index)
            column.validate(full=True)
            columns[field.name] = _Column(column, row_bytes(column), is_other=False)
    for name in (named | nested) - set(columns):
        if "." in name and (inner := _inner(batch, name.split("."))) is not None:
            columns[name] = _column(inner) if name in named else _Column(inner, row_bytes(inner), is_other=False)
    return columns


def _inner(batch: pa.RecordBatch, path: list[str]) -> pa.Array | None:
    """Return the field at a path inside a struct column; None if there is none."""
    head, *names = path
    if batch.schema.get_field_index(head) < 0:
        return None
    column = batch.column(head)
    for name in names:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            return None
        column.validate(full=True)
        column = pc.struct_field(column, name)
    return column


def _column(column: pa.Array) -> _Column:
    types = pa.types
    kind = column.type
    if not _is_plain(kind):
        return _Column(column, 0, is_other=True)
    if types.is_dictionary(kind) and not _is_string(kind.value_type):
        column = column.dictionary_decode()
        kind = column.type
    if types.is_dictionary(kind):
        entries = column.dictionary.cast(_as_bytes(kind.value_type))
        column = pa.DictionaryArray.from_arrays(column.indices, entries, safe=False)
    elif _is_string(kind):
        column = column.cast(_as_bytes(kind))
    elif types.is_temporal(kind) or types.is_decimal(kind):
        column = column.cast(pa.string())
    column.validate(full=True)
    return _Column(column, row_bytes(column), is_other=False)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """Return the binary type with the same layout as a string type."""
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    return pa.binary_view() if pa.types.is_string_view(kind) else pa.binary()


def _row(columns: dict[str, _Column], row: int, config: ReadConfig, location: Location) -> Record | Bad:
    limit = config.max_record_bytes
    size = sum(size_of(column.sizes, row) for column in columns.values())
    if size > limit:
        text = columns.get(config.text_fields[0])
        return location.bad("record_too_long", text.head(row, limit) if text else b"", f"more than {limit} bytes")
    decoded = {name: column.value(row) for name, column in columns.items()}
    values = {name: value for name, value in decoded.items() if value is not None}
    raw = values.get(config.text_fields[0])
    shown = raw if isinstance(raw, bytes) else b""
    for name in config.text_fields:
        if isinstance(other := values.get(name), Other):
            return location.bad("text_not_string", shown, f"a column of type {other.type}")
    try:
        values = {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
    except UnicodeDecodeError as error:
        return location.bad("wrong_encoding", shown, f"byte {error.start}: {error.reason}")
    return record(values, config, location, shown)
