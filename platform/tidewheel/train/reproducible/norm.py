"""The norm of the gradient, bit for bit the same however rows are spread over ranks.

Sharding never splits a row (the first dimension of a tensor). The squares of a row are exact in fp64 and added in an
order that its length alone decides, element-wise: a kernel that reduces may choose its order by the number of rows.
The sums of rows are then added exactly, in fixed point, which no order can change: each is cut into pieces of `BITS`
bits at fixed places, as in Kulisch's long accumulator, and pieces of one place are small integers, whose sums fp64
holds exactly. A rank's answer is `PLACES` numbers, whatever the size of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

BITS = 24
"""Of a piece; 2^(53 - BITS) rows can be added before a sum of pieces is no longer exact."""
TOP = 312
"""The squares of a row add up to less than 2^TOP: fp32 squares to less than 2^256."""
PLACES = 26
"""Pieces from 2^TOP down to 2^-312; the smallest square of fp32 numbers is 2^-298."""
FOLD = 8
"""A row is cut into so many pieces of columns that are added one to the other, again and again."""


def row_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of each row of each tensor, one after the other: [rows] fp64.

    Args:
        tensors: fp32, bf16 or fp16, of one dimension or more and any number of rows.
    """
    found: list[torch.Tensor | None] = [None] * len(tensors)
    alike: dict[int, list[int]] = defaultdict(list)
    matrices = [tensor.reshape(len(tensor), -1) for tensor in tensors if tensor.numel()]
    for number, matrix in enumerate(matrices):
        alike[matrix.shape[1]].append(number)
    for numbers in alike.values():
        for number, sums in zip(numbers, _folded([matrices[number] for number in numbers])):
            found[number] = sums
    device = tensors[0].device if tensors else None
    return torch.cat([sums for sums in found if sums is not None] or [torch.zeros(0, dtype=torch.float64,
                                                                                  device=device)])


def _folded(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """[rows] sums of squares of matrices with the same number of columns."""
    columns = matrices[0].shape[1]
    width = -(-columns // FOLD)
    sums = [matrix.new_zeros(len(matrix), width, dtype=torch.float64) for matrix in matrices]
    for start in range(0, columns, width):
        parts = [matrix[:, start:start + width].double() for matrix in matrices]
        held = [total[:, :parts[0].shape[1]] for total in sums]
        torch._foreach_addcmul_(held, parts, parts)  # products of fp32 numbers are exact: fused or not is the same
    while width > 1:
        columns, width = width, -(-width // FOLD)
        for start in range(width, columns, width):
            parts = [total[:, start:min(start + width, columns)] for total in sums]
            torch._foreach_add_([total[:, :parts[0].shape[1]] for total in sums], parts)
    return [total[:, 0] for total in sums]


def pieces(sums: torch.Tensor) -> torch.Tensor:
    """The exact sum of [rows] fp64 numbers, none negative, as [PLACES] fp64 integers for `value`; pieces of several
    ranks may be added in any order. Not finite if one of the numbers is not."""
    found, rest = [], sums
    for place in range(PLACES):
        unit = 2.0 ** (TOP - BITS * (place + 1))
        whole = torch.floor(rest * (1 / unit))
        rest = rest - whole * unit  # exact: the leading bits are taken off
        found.append(whole.sum())
    return torch.stack(found)


def value(total: torch.Tensor) -> torch.Tensor:
    """The number that the sum of all `pieces` stands for, fp64 scalar, rounded in one fixed order."""
    units = torch.tensor([2.0 ** (TOP - BITS * (place + 1)) for place in range(PLACES)], dtype=torch.float64)
    result = torch.zeros_like(total[0])
    for part in (total * units.to(total.device)).flip(0).unbind():
        result = result + part
    return result
