"""The gradient norm, bit for bit the same however rows are sharded over ranks.

Sharding never splits a row, which is the last dimension of a matrix or of stacked matrices. The squares of a row are
exact in fp64. They are added element-wise in an order that depends only on the row's length; a reduction kernel might
choose its order by the number of rows. The sums of rows are then added exactly in fixed point, so their order does not
matter. Each sum is split into pieces of `BITS` bits at fixed places, as in Kulisch's long accumulator. Pieces of one
place are small integers, whose sums are exact in fp64. A rank's result is `PLACES` numbers for a model of any size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

BITS = 24
"""Bits of a piece. The sum of pieces is exact for up to 2^(53 - BITS) rows."""
TOP = 312
"""The sum of squares of a row is less than 2^TOP. An fp32 square is less than 2^256."""
PLACES = 26
"""Number of pieces from 2^TOP down to 2^-312. The smallest square of an fp32 number is 2^-298."""
CACHED = 1 << 18
"""Elements whose squares a CPU adds up at a time, 2 MiB in fp64: fewer cost more calls, more do not stay in its cache
(6.6 million elements in 13 ms, 25 ms all at once, 25 ms in parts of 1 << 16)."""
FOLD = 8
"""Number of pieces into which a row is split; they are added element-wise, and the result is split again."""


def row_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of squares of all rows of all tensors, in order: fp64 [rows].

    Args:
        tensors: fp32, bf16 or fp16, of one or more dimensions and any number of rows.
    """
    sums: list[list[torch.Tensor]] = [[] for _ in tensors]
    by_width: dict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            matrix = _rows(tensor)
            by_width[matrix.shape[1]].append((index, matrix))
    for numbered in by_width.values():
        for batch in _batches(numbered):
            for (index, _), of_rows in zip(batch, _folded([matrix for _, matrix in batch])):
                sums[index].append(of_rows)
    device = tensors[0].device if tensors else None
    return torch.cat([of_rows for parts in sums for of_rows in parts]
                     or [torch.zeros(0, dtype=torch.float64, device=device)])


def _batches(numbered: Sequence[tuple[int, torch.Tensor]]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Yield numbered matrices of one width, to be computed together: on a CPU, rows that fit into its cache."""
    if numbered[0][1].is_cuda:  # a kernel each costs more than memory does
        yield list(numbered)
        return
    batch: list[tuple[int, torch.Tensor]] = []
    room = CACHED
    for index, matrix in numbered:
        for part in matrix.split(max(1, CACHED // matrix.shape[1])):
            if batch and part.numel() > room:
                yield batch
                batch = []
                room = CACHED
            batch.append((index, part))
            room -= part.numel()
    yield batch


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor, a matrix; of stacked matrices, whose second dimension may be sharded, their rows."""
    return tensor.reshape(len(tensor), -1) if tensor.ndim < 3 else tensor.flatten(0, -2)


def _folded(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of squares [rows] of each of several matrices with the same number of columns."""
    columns = matrices[0].shape[1]
    width = -(-columns // FOLD)
    sums = [matrix.new_zeros(len(matrix), width, dtype=torch.float64) for matrix in matrices]
    for start in range(0, columns, width):
        parts = [matrix[:, start:start + width].double() for matrix in matrices]
        held = [total[:, :parts[0].shape[1]] for total in sums]
        torch._foreach_addcmul_(held, parts, parts)  # products of fp32 numbers are exact, fused or not
    while width > 1:
        columns, width = width, -(-width // FOLD)
        for start in range(width, columns, width):
            parts = [total[:, start:min(start + width, columns)] for total in sums]
            torch._foreach_add_([total[:, :parts[0].shape[1]] for total in sums], parts)
    return [total[:, 0] for total in sums]


def pieces(sums: torch.Tensor) -> torch.Tensor:
    """Return the exact sum as integers, fp64 [PLACES], for `value`. Pieces of several ranks may be added in any order.

    Args:
        sums: fp64 [rows], not negative. If one is not finite, neither is the result.
    """
    result = []
    rest = sums
    skips = len(sums) > 0 and not sums.is_cuda  # on a GPU the host would wait for it
    largest = float(sums.max()) if skips else math.inf
    for digit in range(PLACES):
        unit = 2.0 ** (TOP - BITS * (digit + 1))
        if largest < unit:
            result.append(sums.new_zeros(()))
            continue
        whole = torch.floor(rest * (1 / unit))
        rest = rest - whole * unit  # exact, because it removes the leading bits
        result.append(whole.sum())
        if skips:
            largest = float(rest.max())
    return torch.stack(result)


def value(total: torch.Tensor) -> torch.Tensor:
    """Return the value of summed `pieces`, an fp64 scalar, rounded in one fixed order."""
    result = torch.zeros_like(total[0])
    for place in reversed(range(PLACES)):
        result = result + total[place] * 2.0 ** (TOP - BITS * (place + 1))  # numbers of the host need no copy
    return result
