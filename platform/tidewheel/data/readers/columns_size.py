"""Compute how many bytes the rows of an Arrow array decode to, without decoding them.

A dictionary, a view or a list of empty values takes a few bytes for any number of large values.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Sizes = np.ndarray | float
"""Bytes of each row (float64 [rows]), or one number for all rows. Floats do not overflow if nested lists repeat large
values."""
_VALUE_BYTES = 8.0  # size of a number, a date or a missing value in a list


def size_of(sizes: Sizes, row: int) -> int:
    """Return the bytes of one row."""
    return int(sizes[row] if isinstance(sizes, np.ndarray) else sizes)


def row_bytes(values: pa.Array) -> Sizes:
    """Return the number of bytes to which each row decodes: the length of strings, `_VALUE_BYTES` for other values.

    Args:
        values: a fully validated array.

    Raises:
        ArrowNotImplementedError: the type cannot be measured (unions, run-end encoding).
    """
    types = pa.types
    kind = values.type
    if types.is_dictionary(kind):
        return _taken(row_bytes(values.dictionary), values.indices)
    if types.is_struct(kind):
        return sum((row_bytes(field) for field in values.flatten()), start=_VALUE_BYTES)
    if types.is_map(kind):
        return _of_ranges(row_bytes(values.keys) + row_bytes(values.items), *_ends(values))
    if types.is_list(kind) or types.is_large_list(kind):
        return _of_ranges(row_bytes(values.values), *_ends(values))
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        first = values.offsets.to_numpy().astype(np.int64)
        return _of_ranges(row_bytes(values.values), first, first + values.sizes.to_numpy())
    if types.is_fixed_size_list(kind):
        first = (np.arange(len(values)) + values.offset) * kind.list_size
        return _of_ranges(row_bytes(values.values), first, first + kind.list_size)
    if types.is_union(kind) or types.is_run_end_encoded(kind):
        raise pa.ArrowNotImplementedError(f"a column of type {kind}")
    return _of_plain(values)


def largest_entry(values: pa.Array) -> int:
    """Return the size in bytes of the largest dictionary entry in this array; 0 if it has no dictionary entries."""
    types = pa.types
    kind = values.type
    if types.is_dictionary(kind):
        return int(np.max(row_bytes(values.dictionary), initial=0)) if len(values.dictionary) else 0
    if types.is_struct(kind):
        return max((largest_entry(values.field(index)) for index in range(kind.num_fields)), default=0)
    if types.is_map(kind):
        return max(largest_entry(values.keys), largest_entry(values.items))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return largest_entry(values.values)
    return 0


def _of_plain(values: pa.Array) -> Sizes:
    types = pa.types
    kind = values.type
    if isinstance(values, pa.ExtensionArray):
        return row_bytes(values.storage)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(values.buffers()[1] or b"", np.int32)[::4]  # a view begins with its length
        lengths = views[values.offset : values.offset + len(values)].astype(np.float64)
        return np.where(values.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    if types.is_fixed_size_binary(kind):
        return float(kind.byte_width)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.float64)
    return _VALUE_BYTES


def _ends(lists: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    offsets = lists.offsets.to_numpy()
    return offsets[:-1], offsets[1:]


def _of_ranges(sizes: Sizes, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the bytes of each list: the sum over its values, plus `_VALUE_BYTES` for each value."""
    total = (last - first) * _VALUE_BYTES
    if not isinstance(sizes, np.ndarray):
        return total + (last - first) * sizes
    until = np.concatenate([[0.0], np.cumsum(sizes)])
    return total + until[last] - until[first]


def _taken(sizes: Sizes, indices: pa.Array) -> Sizes:
    if not isinstance(sizes, np.ndarray):
        return sizes
    missing = len(sizes)
    rows = pc.fill_null(indices.cast(pa.int64()), missing).to_numpy(zero_copy_only=False)
    return np.append(sizes, 0.0)[rows]
