"""Experts whose bits do not depend on which ranks share them.

With expert parallelism a rank computes the rows of several source micro-batches. Everything is computed for each
(source, expert) by itself, so each matrix product has the shape and the content that it has without expert parallelism.
A weight gradient, which adds up the rows of a product, becomes its source's leaf in the sum of gradients (`tree.py`).

One product for the rows of all sources would be faster but not the same: a library of matrix products chooses its order
of additions by the number of rows and of threads (`python -m tests.benchmarks.expert_products` shows where), on some
CPUs (AMD EPYC with AVX-512) by the address of an operand, too. So operands that begin inside a cache line are copied;
there are none if widths are multiples of 64 bytes. Even the activation depends on where a row is: a CPU computes the
last elements of a tensor without vector instructions, whose exponential has other last bits.

Suffixes of names give shapes: R rows, G groups of rows (one of each source), E experts of this rank, N, M and F widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch._compile import _disable_dynamo

from tidewheel.models.moe.experts import Activation, Arithmetic, add_bias, clamped_swiglu, grouped_product
from tidewheel.train.reproducible.exchange import PartialSum
from tidewheel.train.reproducible.tree import Node

LINE_BYTES = 64
"""A cache line, at the beginning of which torch allocates tensors on a CPU."""
Keep = Callable[[int, Sequence[torch.Tensor]], None]
"""Takes the number of a piece of a parameter, which is some of its experts, and the piece's gradient by source."""


class BySource(Arithmetic):
    """The arithmetic of a layer's experts in reproducible mode, and their gradients if they have several sources.

    A group of rows is a source. With several sources, the counts are on the host, and the gradients are added up here
    until they are reduced. The gradients that autograd returns then are not used.

    Args:
        bias_share: `Experts.output_bias_share`, a factor of the gradient of `w2_bias`.
    """

    LOOPED: ClassVar[tuple[str, ...]] = ("cpu",)
    """Devices whose grouped product is a loop of products, so that an own loop has the same bits."""

    def __init__(self, bias_share: float = 1.0) -> None:
        self._bias_share = bias_share
        self.new_sum: Callable[[], PartialSum] | None = None
        """Creates the sum of a piece's gradients; whatever reduces gradients sets it."""
        self._sums: dict[str, list[PartialSum]] = {}

    def take(self, name: str) -> list[tuple[Node, list[torch.Tensor]]]:
        """Return the nodes of the sum of a parameter's gradients, each with the gradient of each expert; forget them.

        Args:
            name: of the parameter, such as "w1".
        """
        pieces = [piece.take() for piece in self._sums[name]]
        return [(nodes[0][0], [gradient for _, value in nodes for gradient in value.unbind()])
                for nodes in zip(*pieces, strict=True)]

    @_disable_dynamo  # compiled code may have other bits
    def product(self, rows_RN: torch.Tensor, weight_EMN: torch.Tensor, bias_EM: torch.Tensor | None,
                counts_GE: torch.Tensor, name: str) -> torch.Tensor:
        keep = partial(self._add, name)
        if rows_RN.device.type in self.LOOPED:
            products = _Loop.apply(rows_RN, weight_EMN, counts_GE.flatten().tolist(), keep)
        else:
            weights, counts = _PerSource.apply(weight_EMN, len(counts_GE), keep), counts_GE.to(rows_RN.device)
            parts = rows_RN.split(counts_GE.sum(dim=1).tolist()) if len(counts_GE) > 1 else (rows_RN,)
            products = torch.cat([grouped_product(*operands) for operands in zip(parts, weights, counts)])
        if bias_EM is None:
            return products
        biases = _PerSource.apply(bias_EM, len(counts_GE), partial(self._add, f"{name}_bias"))
        return add_bias(products, torch.cat(biases), counts_GE.flatten().to(rows_RN.device))

    def activate(self, kind: Activation, gate_RF: torch.Tensor, up_RF: torch.Tensor,
                 counts_GE: torch.Tensor) -> torch.Tensor:
        if gate_RF.device.type != "cpu":  # other devices compute all elements in the same way
            return super().activate(kind, gate_RF, up_RF, counts_GE)
        sizes = counts_GE.flatten().tolist()
        if kind == "silu":
            return _GatedSilu.apply(gate_RF, up_RF, sizes)
        return torch.cat([clamped_swiglu(*parts) for parts in zip(gate_RF.split(sizes), up_RF.split(sizes))])

    def _add(self, name: str, piece: int, gradients: Sequence[torch.Tensor]) -> None:
        assert self.new_sum is not None, "nothing reduces the gradients of several sources"
        sums = self._sums.setdefault(name, [])
        if piece == len(sums):
            sums.append(self.new_sum())
        share = self._bias_share if name == "w2_bias" else 1.0
        sums[piece].add(*(gradient.float() if share == 1.0 else gradient.float() * share for gradient in gradients))


class _Loop(torch.autograd.Function):
    """The product of each (source, expert).

    The gradients of an expert's matrix from all sources are added up before those of the next expert are computed,
    while they are in the processor's cache. Later, adding up took as long as the forward pass's products (64 experts).
    """

    @staticmethod
    def forward(ctx: Any, rows_RN: torch.Tensor, weight_EMN: torch.Tensor, sizes: list[int],
                keep: Keep) -> torch.Tensor:
        ctx.save_for_backward(rows_RN, weight_EMN)
        ctx.sizes, ctx.keep = sizes, keep
        products = rows_RN.new_empty(len(rows_RN), weight_EMN.shape[1])
        rows, out = rows_RN.split(sizes), products.split(sizes)
        for expert, matrix in enumerate(weight_EMN.unbind()):
            for group in range(expert, len(sizes), len(weight_EMN)):
                _product(rows[group], matrix.t(), out[group])
        return products

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        rows_RN, weight_EMN = ctx.saved_tensors
        to_rows, to_weight = torch.empty_like(rows_RN), torch.empty_like(weight_EMN)
        gradients, rows, out = (whole.split(ctx.sizes) for whole in (grad_outputs[0].contiguous(), rows_RN, to_rows))
        for expert, matrix in enumerate(weight_EMN.unbind()):
            groups = range(expert, len(ctx.sizes), len(weight_EMN))
            for group in groups:
                _product(gradients[group], matrix, out[group])
            if not ctx.needs_input_grad[1]:
                continue
            if len(groups) == 1:
                _product(gradients[expert].t(), rows[expert], to_weight[expert])
            else:
                ctx.keep(expert, [(_aligned(gradients[group].t()) @ _aligned(rows[group]))[None] for group in groups])
        return to_rows, to_weight, None, None


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write the product of two matrices to `out`, with the same bits wherever the three are in memory."""
    if out.data_ptr() % LINE_BYTES:
        out.copy_(_aligned(left) @ _aligned(right))
    else:
        torch.mm(_aligned(left), _aligned(right), out=out)


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix, or a copy with the same strides if it begins inside a cache line."""
    return matrix.clone() if matrix.data_ptr() % LINE_BYTES else matrix


class _PerSource(torch.autograd.Function):
    """A parameter for each source. If there are several, their gradients go to `keep` in one piece."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, sources: int, keep: Keep) -> tuple[torch.Tensor, ...]:
        ctx.keep = keep
        return tuple(parameter.view_as(parameter) for _ in range(sources))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        if len(grad_outputs) > 1:
            ctx.keep(0, grad_outputs)
        return grad_outputs[0], None, None


class _GatedSilu(torch.autograd.Function):
    """silu(gate) x up, where silu and its derivative are computed for each block of rows by itself."""

    @staticmethod
    def forward(ctx: Any, gate_RF: torch.Tensor, up_RF: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        activated = torch.empty_like(gate_RF)
        for gate, out in zip(gate_RF.split(sizes), activated.split(sizes)):
            torch.ops.aten.silu.out(gate, out=out)
        ctx.save_for_backward(gate_RF, up_RF, activated)
        ctx.sizes = sizes
        return activated * up_RF

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        gate_RF, up_RF, activated = ctx.saved_tensors
        to_activated = grad_outputs[0] * up_RF
        to_gate = torch.empty_like(gate_RF)
        blocks = zip(to_activated.split(ctx.sizes), gate_RF.split(ctx.sizes), to_gate.split(ctx.sizes))
        for gradient, gate, out in blocks:
            torch.ops.aten.silu_backward.grad_input(gradient, gate, grad_input=out)
        return to_gate, grad_outputs[0] * activated, None
