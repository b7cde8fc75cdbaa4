"""Parquet and Arrow files: a row is a record, its columns are the fields.

Text columns are taken as bytes and decoded row by row, so that one bad value is one bad row. Nested and binary
columns that no field is mapped to are left out. A row is measured before it is decoded: a few bytes of a dictionary
may stand for any number of large values. Memory is bounded by `BATCH_BYTES` of decoded values, one row of
`max_record_bytes`, and one page of Parquet or record batch of Arrow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers.columns_size import Sizes, largest_entry, row_bytes, size_of
from tidewheel.data.readers.packed import first_line, told
from tidewheel.data.readers.record import Place, Record, document_fields, message_fields, record
from tidewheel.storage import Store

BATCH_BYTES = 16 << 20
"""Decoded values that are read from a Parquet file at once; more only where one row has more."""
_BATCH_ROWS = 1024
_LOOK_BYTES = 1 << 20  # a look at a column's dictionary must not fetch all of the column
_FILE_MAGIC = b"ARROW1"
_FAULTS = (OSError, pa.ArrowException, UnicodeDecodeError)


@dataclass(frozen=True)
class Other:
    """A value that can be neither text nor id nor source: of no string or whole number type."""

    type: str


@dataclass(frozen=True)
class _Lost:
    """Rows that a damaged part of the file held."""

    first: int
    rows: int
    detail: str


def records(place: Store, key: str, kind: str, config: ReadConfig, name: str, span: tuple[int, int] | None
            ) -> Iterator[Record | Bad]:
    """The rows of a "parquet" or "arrow" file, or those of the row groups `span` [first, last) of a Parquet file.

    The number of a row, from 1, is its line, and from 0 its offset. A damaged row group or batch is one bad record
    that stands for its rows.
    """
    named, nested = document_fields(config), message_fields(config)
    with told(place, key), place.open(key) as stream:
        if place.size(key) == 0:
            return
        batches = _parquet(stream, named | nested, span) if kind == "parquet" else _arrow(stream)
        for found in batches:
            if isinstance(found, _Lost):
                yield _lost(found, name)
                continue
            first, batch = found
            try:
                columns = _columns(batch, named, nested)
            except MemoryError:
                raise
            except _FAULTS as error:
                yield _lost(_Lost(first, batch.num_rows, first_line(error)), name)
                continue
            for row in range(batch.num_rows):
                yield _row(columns, row, config, Place(name, first + row + 1, first + row))


def row_groups(place: Store, key: str, size: int) -> list[tuple[int, int]]:
    """Ranges [first, last) of a Parquet file's row groups, each of about `size` bytes; [] when it cannot be read."""
    try:
        with place.open(key) as stream:
            metadata = pq.ParquetFile(stream).metadata
            sizes = [_compressed_bytes(metadata.row_group(number)) for number in range(metadata.num_row_groups)]
    except (FileNotFoundError, MemoryError):
        raise
    except _FAULTS:
        return []
    ranges: list[tuple[int, int]] = []
    first, taken = 0, 0
    for number, one in enumerate(sizes):
        if taken and taken + one > size:
            ranges.append((first, number))
            first, taken = number, 0
        taken += one
    return [*ranges, (first, len(sizes))] if sizes else []


def _compressed_bytes(group: Any) -> int:
    return sum(group.column(number).total_compressed_size for number in range(group.num_columns))


def _lost(found: _Lost, name: str) -> Bad:
    place = Place(name, found.first + 1, found.first)
    bad = place.bad("damaged_rows", b"", f"rows from {found.first + 1}: {found.detail}")
    return Bad(**{**bad.__dict__, "records": max(found.rows, 1)})


def _parquet(stream: Any, named: set[str], span: tuple[int, int] | None
             ) -> Iterator[tuple[int, pa.RecordBatch] | _Lost]:
    """(number of its first row, batch), one row group after the other."""
    file = pq.ParquetFile(stream, page_checksum_verification=True)
    metadata = file.metadata
    columns = [field.name for field in file.schema_arrow if field.name in named or _is_plain(field.type)]
    paths = [file.schema.column(index).path for index in range(len(file.schema))]
    columns += sorted(name for name in named if "." in name and name not in columns
                      and any(_is_below(path, name) for path in paths))
    first, last = span or (0, metadata.num_row_groups)
    row = sum(metadata.row_group(number).num_rows for number in range(first))
    for number in range(first, last):
        end = row + metadata.row_group(number).num_rows
        try:
            for batch in _group_batches(stream, file, number, columns):
                yield row, batch
                row += batch.num_rows
        except (FileNotFoundError, MemoryError):
            raise
        except _FAULTS as error:
            yield _Lost(row, end - row, first_line(error))
        row = end


def _group_batches(stream: Any, file: pq.ParquetFile, number: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The batches of a row group, of so few rows that what they decode to is bounded.

    Columns of one value a row are decoded, and rows are counted by the largest value that the dictionary holds. Of
    nested columns a single row may repeat a value any number of times: where that is too much they stay dictionaries.
    """
    group = file.metadata.row_group(number)
    read = [index for index in range(group.num_columns) if _is_read(group.column(index), columns)]
    chunks = [group.column(index) for index in read]
    largest = {group.column(index).path_in_schema: _largest_value(stream, file, number, index) for index in read}
    repeated = [chunk.path_in_schema for chunk in chunks
                if chunk.path_in_schema not in columns and chunk.physical_type == "BYTE_ARRAY"
                and chunk.has_dictionary_page and largest[chunk.path_in_schema] * chunk.num_values > BATCH_BYTES]
    widest = sum(size for path, size in largest.items() if path not in repeated)
    average = group.total_byte_size // max(group.num_rows, 1)
    rows = max(1, min(_BATCH_ROWS, BATCH_BYTES // max(widest, average, 1)))
    if repeated:
        file = pq.ParquetFile(stream, metadata=file.metadata, page_checksum_verification=True, read_dictionary=repeated)
    return file.iter_batches(rows, row_groups=[number], columns=columns)


def _is_read(chunk: Any, columns: list[str]) -> bool:
    return any(_is_below(chunk.path_in_schema, name) for name in columns)


def _is_below(path: str, name: str) -> bool:
    """True when the column at `path` is the field `name` or a part of it."""
    return path == name or path.startswith(f"{name}.")


def _largest_value(stream: Any, file: pq.ParquetFile, number: int, index: int) -> int:
    """How many bytes a value of a column may decode to without taking as many in its page; 0 when it cannot.

    The largest entry of its dictionary. In DELTA_BYTE_ARRAY a value may begin with all of the one before it: as much
    as the column has in the row group.
    """
    chunk = file.metadata.row_group(number).column(index)
    path = chunk.path_in_schema
    if chunk.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return int(file.schema.column(index).length)
    if chunk.physical_type != "BYTE_ARRAY":
        return 0
    if "DELTA_BYTE_ARRAY" in chunk.encodings:
        return int(chunk.total_uncompressed_size)
    if not chunk.has_dictionary_page:
        return 0
    kept = pq.ParquetFile(stream, metadata=file.metadata, page_checksum_verification=True, read_dictionary=[path],
                          buffer_size=_LOOK_BYTES)
    for batch in kept.iter_batches(_BATCH_ROWS, row_groups=[number], columns=[path]):
        if size := max(map(largest_entry, batch.columns), default=0):
            return size
    return 0


def _arrow(stream: Any) -> Iterator[tuple[int, pa.RecordBatch] | _Lost]:
    """(number of its first row, batch). Behind a damaged batch nothing is read: its rows cannot be counted."""
    head = stream.read(len(_FILE_MAGIC))
    stream.seek(0)
    row = 0
    if head == _FILE_MAGIC:
        file = pa.ipc.open_file(stream)
        batches = (file.get_batch(number) for number in range(file.num_record_batches))
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
    """A column of a batch, decoded value by value."""

    values: pa.Array
    sizes: Sizes
    is_other: bool

    def value(self, row: int) -> Any:
        """A JSON value, a string as bytes, an `Other`; None where there is none."""
        scalar = self.values[row]
        if not scalar.is_valid:
            return None
        if self.is_other:
            return Other(str(self.values.type))
        value = scalar.as_py()
        if pa.types.is_floating(self.values.type):  # NaN is no JSON
            return float(value) if math.isfinite(value) else None
        return _without_nulls(value)

    def head(self, row: int, size: int) -> bytes:
        """The first bytes of a string."""
        scalar = self.values[row]
        if isinstance(scalar, pa.DictionaryScalar):
            scalar = scalar.value
        data = scalar.as_buffer() if scalar.is_valid and hasattr(scalar, "as_buffer") else None
        return data.slice(0, min(size, data.size)).to_pybytes() if data else b""


def _without_nulls(value: Any) -> Any:
    """Return a nested value without fields that are null: in a column every struct has the fields of all."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _columns(batch: pa.RecordBatch, named: set[str], nested: set[str]) -> dict[str, _Column]:
    """The columns that are read, by name; of two with the same name the first."""
    found: dict[str, _Column] = {}
    for number, field in enumerate(batch.schema):
        if field.name not in found and (field.name in named or _is_plain(field.type)):
            found[field.name] = _column(batch.column(number))
        elif field.name not in found and field.name in nested:  # messages
            column = batch.column(number)
            column.validate(full=True)
            found[field.name] = _Column(column, row_bytes(column), is_other=False)
    for name in (named | nested) - set(found):
        if "." in name and (inner := _inner(batch, name.split("."))) is not None:
            found[name] = _column(inner) if name in named else _Column(inner, row_bytes(inner), is_other=False)
    return found


def _inner(batch: pa.RecordBatch, path: list[str]) -> pa.Array | None:
    """The field of a struct column that a path leads to; None when there is none."""
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
    """The type that holds the same bytes without a claim that they are text."""
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    return pa.binary_view() if pa.types.is_string_view(kind) else pa.binary()


def _row(columns: dict[str, _Column], row: int, config: ReadConfig, place: Place) -> Record | Bad:
    limit = config.max_record_bytes
    size = sum(size_of(column.sizes, row) for column in columns.values())
    if size > limit:
        text = columns.get(config.text_fields[0])
        return place.bad("record_too_long", text.head(row, limit) if text else b"", f"more than {limit} bytes")
    decoded = {name: column.value(row) for name, column in columns.items()}
    values = {name: value for name, value in decoded.items() if value is not None}
    raw = values.get(config.text_fields[0])
    shown = raw if isinstance(raw, bytes) else b""
    for name in config.text_fields:
        if isinstance(other := values.get(name), Other):
            return place.bad("text_not_string", shown, f"a column of type {other.type}")
    try:
        values = {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
    except UnicodeDecodeError as error:
        return place.bad("wrong_encoding", shown, f"byte {error.start}: {error.reason}")
    return record(values, config, place, shown)
