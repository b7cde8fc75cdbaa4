"""Adapters of the stacked matrices of experts: each expert has an A and a B of its own.

E is the number of experts, R the rank, I and O are the widths of a matrix's input and output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tidewheel.models.adapting.names import EXPERTS
from tidewheel.models.moe.experts import Experts

MATRICES = ("w1", "w3", "w2")


class StackedLinear(nn.Module):
    """One stack of matrices [E, O, I] as a layer that an adapter can be attached to. It owns no parameters.

    Args:
        holder: the experts, whose parameter the stack is.
        matrix: name of the parameter.
    """

    holder: Any
    bias: torch.Tensor | None = None

    def __init__(self, holder: nn.Module, matrix: str) -> None:
        super().__init__()
        vars(self)["holder"] = holder  # not a submodule
        self.matrix = matrix

    @property
    def weight(self) -> nn.Parameter:
        """Return the stack [E, O, I]."""
        weight: nn.Parameter = self.holder.get_parameter(self.matrix)
        return weight


class Updates(nn.ModuleDict):
    """The adapters of some stacks of one layer's experts, by the names of the stacks."""

    def forward(self, experts: Experts, y: torch.Tensor, rows_RI: torch.Tensor, counts_GE: torch.Tensor,
                matrix: str) -> torch.Tensor:
        """Return the product of rows with a stack, with its adapter's.

        Args:
            experts: compute the products.
            y: product of the stack.
            rows_RI: its input, sorted by group, then by expert.
            counts_GE: see `Experts.forward`.
            matrix: name of the stack.
        """
        if matrix not in self:
            return y

        def product(rows: torch.Tensor, weight: torch.Tensor, key: str) -> torch.Tensor:
            return experts.arithmetic.product(rows, weight.to(rows.dtype), None, counts_GE, f"adapter.{matrix}.{key}")

        return y + self[matrix].update(rows_RI, product).to(y.dtype)  # type: ignore[operator]


def stacks(block: nn.Module) -> Iterator[tuple[str, StackedLinear]]:
    """Yield (name in the block, stack) of the experts of a block."""
    for name, module in block.named_modules():
        if isinstance(module, Experts):
            assert f".{name}".endswith(EXPERTS)
            yield from ((f"{name}.{matrix}", StackedLinear(module, matrix)) for matrix in MATRICES)
