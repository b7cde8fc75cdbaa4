"""Sums of gradients as products of two thin matrices: PowerSGD, algorithm 1 of https://arxiv.org/abs/1905.13727."""

from __future__ import annotations

import torch

from tidewheel.train.compression import At, Exchange, Sum
from tidewheel.train.compressions.coding.counter import uniform


def start(name: str, columns: int, rank: int, seed: int) -> torch.Tensor:
    """Return the first right factor, fp32 [columns, rank] on the CPU: random, the same on every worker.

    Args:
        name: of the parameter.
        columns: of its matrix.
        rank: of the approximation.
        seed: of the run.
    """
    at = At(name, (columns, rank), 0, seed, range(1), 1)
    return uniform(at, "factor", range(1), columns * rank, torch.device("cpu")).view(columns, rank).sub_(0.5)


def summed(values: torch.Tensor, at: At, rows: int, columns: int) -> Exchange:
    """Sum the gradients of all slots; see `Compression.sum`.

    Args:
        values: of the own slots.
        at: which gradient, and when.
        rows: of the matrix.
        columns: of the matrix.
    """
    matrices = values.view(-1, rows, columns)
    left = yield Sum(_products(matrices, at.state["factor"]))
    left = torch.linalg.qr(left).Q
    right = yield Sum(_products(matrices.mT, left))
    total = left @ right.T
    matrices -= total / at.all_slots  # every slot has sent an equal part of the sum
    at.new["factor"] = right
    return total.flatten()


def _products(matrices: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return each matrix times `factor`, one by one: a batched product may round by the size of the batch."""
    return torch.stack([matrix @ factor for matrix in matrices])
