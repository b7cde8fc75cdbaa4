"""Experts whose bits do not depend on which ranks share them.

With expert parallelism a rank computes the rows of several source micro-batches. Everything is computed for each
(source, expert) by itself, so each matrix product has the shape and the content that it has without expert parallelism.
A weight gradient, which adds up the rows of a product, becomes its source's leaf in the sum of gradients (`tree.py`).

One product for the rows of all sources would be faster but not the same: a library of matrix products chooses its order
of additions by the number of rows and of threads. `python -m tests.benchmarks.expert_products` shows where. Even
the activation depends on where a row is: a CPU computes the last elements of a tensor without vector instructions,
whose exponential has other last bits.

Suffixes of names give shapes: R rows, G groups of rows (one of each source), E experts of this rank, N, M and F widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tidewheel.models.moe.experts import Activation, Arithmetic, activation, expert_product


class BySource(Arithmetic):
    """The arithmetic of a layer's experts in reproducible mode, and the weight gradients of other sources.

    A group of rows is a source. The gradient of the first source is autograd's. Those of the others stay here until the
    gradients are reduced. With several sources, the counts are on the host.
    """

    def __init__(self) -> None:
        self.bias_share = 1.0
        """`Experts.output_bias_share`, a factor of the gradient of `w2_bias`."""
        self._others: dict[str, list[torch.Tensor]] = {}

    def take(self, name: str) -> list[torch.Tensor]:
        """Return the gradients of a parameter from the sources after the first, and forget them.

        Args:
            name: of the parameter, such as "w1".
        """
        return self._others.pop(name, [])

    def product(self, rows_RN: torch.Tensor, weight_EMN: torch.Tensor, bias_EM: torch.Tensor | None,
                counts_GE: torch.Tensor, name: str) -> torch.Tensor:
        sources = len(counts_GE)
        if sources == 1:
            return expert_product(rows_RN, weight_EMN, bias_EM, counts_GE[0])
        weights = _PerSource.apply(weight_EMN, sources, partial(self._keep, name, 1.0))
        biases: Sequence[torch.Tensor | None] = [None] * sources
        if bias_EM is not None:
            share = self.bias_share if name == "w2" else 1.0
            biases = _PerSource.apply(bias_EM, sources, partial(self._keep, f"{name}_bias", share))
        parts = rows_RN.split(counts_GE.sum(dim=1).tolist())
        counts = counts_GE.to(rows_RN.device, non_blocking=True)
        return torch.cat([expert_product(*operands) for operands in zip(parts, weights, biases, counts)])

    def activate(self, kind: Activation, gate_RF: torch.Tensor, up_RF: torch.Tensor,
                 counts_GE: torch.Tensor) -> torch.Tensor:
        if gate_RF.device.type != "cpu":  # other devices compute all elements in the same way
            return activation(kind, gate_RF, up_RF)
        sizes = counts_GE.flatten().tolist()
        if kind == "silu":
            return _GatedSilu.apply(gate_RF, up_RF, sizes)
        return torch.cat([activation(kind, gate, up) for gate, up in zip(gate_RF.split(sizes), up_RF.split(sizes))])

    def _keep(self, name: str, share: float, gradients: list[torch.Tensor]) -> None:
        self._others[name] = gradients if share == 1.0 else [gradient * share for gradient in gradients]


class _PerSource(torch.autograd.Function):
    """The same parameter for each source. The gradient of the first is autograd's, the others are kept."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, sources: int,
                keep: Callable[[list[torch.Tensor]], None]) -> tuple[torch.Tensor, ...]:
        ctx.keep = keep
        return tuple(parameter.view_as(parameter) for _ in range(sources))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        first, *others = grad_outputs
        ctx.keep(others)
        return first, None, None


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
