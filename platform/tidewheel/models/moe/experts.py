"""Expert feed-forwards, computed as grouped matrix products over rows that are sorted by expert.

Suffixes of names give shapes: R rows, G groups, E experts, D model width, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor, Partial

from tidewheel.models.loss import product_dtype

Activation = Literal["silu", "clamped"]
GROUPED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that `torch.nn.functional.grouped_mm` takes on a CPU."""
ALIGNMENT = 16
"""Every stride of an operand of a grouped product is a multiple of this many bytes."""
CLAMP = 7.0
"""Limit of GPT-OSS's activation, `swiglu_limit` in https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json."""
SIGMOID_SCALE = 1.702
"""Factor inside the sigmoid of GPT-OSS's activation, as in the sigmoid form of GELU (https://arxiv.org/abs/1606.08415
section 2)."""


class Experts(nn.Module):
    """E gated feed-forwards, w2(activation(w1 x, w3 x)), each over its own rows.

    Matrices are stacked, so that sharding, optimizers and checkpoints see one tensor for all experts.

    Args:
        num_experts: number of experts.
        dim: width of the input and the output.
        inner: width between them.
        bias: add a bias to each product, as GPT-OSS does.
        activation: silu: silu(gate) * up. clamped: GPT-OSS's, see `clamped_swiglu`.
    """

    def __init__(self, num_experts: int, dim: int, inner: int, *, bias: bool = False,
                 activation: Activation = "silu") -> None:
        super().__init__()
        self.activation = activation
        self.w1 = nn.Parameter(torch.empty(num_experts, inner, dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, inner, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, inner))
        self.w1_bias = nn.Parameter(torch.empty(num_experts, inner)) if bias else None
        self.w3_bias = nn.Parameter(torch.empty(num_experts, inner)) if bias else None
        self.w2_bias = nn.Parameter(torch.empty(num_experts, dim)) if bias else None
        self.output_bias_share = 1.0
        """Factor of `w2_bias`. Tensor parallelism, which adds up the outputs of its ranks, sets it to 0 on all but the
        first rank."""
        self.arithmetic = Arithmetic()
        """Computes products and activations; reproducible mode replaces it."""
        self.adapter: Any = None
        """Adds to the products of some matrices; see `models.adapting.experts.Updates`."""

    def forward(self, rows_RD: torch.Tensor, counts_GE: torch.Tensor) -> torch.Tensor:
        """Return the output of each row's expert, [R, D] in the dtype of matrix products.

        An expert without rows gets zeros as its gradient.

        Args:
            rows_RD: sorted by group, then by expert.
            counts_GE: int64, the number of rows of each expert in each group; they add up to R. Expert e is the e-th
                local one. It may be on the device. Without expert parallelism there is one group.
        """
        rows = rows_RD.to(product_dtype(rows_RD))
        gate = self._product("w1", rows, counts_GE)
        up = self._product("w3", rows, counts_GE)
        return self._product("w2", self.arithmetic.activate(self.activation, gate, up, counts_GE), counts_GE)

    def _product(self, name: str, rows: torch.Tensor, counts_GE: torch.Tensor) -> torch.Tensor:
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
        if bias is not None:
            bias = local_part(bias)
            if name == "w2":
                bias = bias * self.output_bias_share
        product = self.arithmetic.product(rows, local_part(weight).to(rows.dtype), bias, counts_GE, name)
        return product if self.adapter is None else self.adapter(self, product, rows, counts_GE, name)


class Arithmetic:
    """How experts compute rows that are sorted by group, then by expert. This one knows a single group."""

    def product(self, rows_RN: torch.Tensor, weight_EMN: torch.Tensor, bias_EM: torch.Tensor | None,
                counts_GE: torch.Tensor, name: str) -> torch.Tensor:
        """Return [R, M], the product of each row with its expert's matrix.

        Args:
            rows_RN: the rows.
            weight_EMN: a matrix for each expert.
            bias_EM: added to the product.
            counts_GE: int64, rows of each expert in each group; they add up to R.
            name: of the weight.
        """
        (counts_E,) = counts_GE
        product = grouped_product(rows_RN, weight_EMN, counts_E)
        return product if bias_EM is None else add_bias(product, bias_EM, counts_E)

    def activate(self, kind: Activation, gate_RF: torch.Tensor, up_RF: torch.Tensor,
                 counts_GE: torch.Tensor) -> torch.Tensor:
        """Return [R, F], the activation of each row.

        Args:
            kind: silu: silu(gate) * up. clamped: `clamped_swiglu`.
            gate_RF: of the rows.
            up_RF: of the rows.
            counts_GE: see `product`.
        """
        return clamped_swiglu(gate_RF, up_RF) if kind == "clamped" else F.silu(gate_RF) * up_RF


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return GPT-OSS's activation: (up + 1) * gate * sigmoid(1.702 gate).

    The gate is clamped from above and `up` from both sides (https://arxiv.org/abs/2508.10925 section 2.1).
    """
    gate = gate.clamp(max=CLAMP)
    up = up.clamp(min=-CLAMP, max=CLAMP)
    return (up + 1) * (gate * torch.sigmoid(SIGMOID_SCALE * gate))


def grouped_product(rows_RN: torch.Tensor, weight_EMN: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Return [R, M], the product of each expert's rows with its transposed matrix.

    It is one grouped product where dtype and strides allow, a loop over experts elsewhere. On a GPU the loop waits for
    the counts.

    Args:
        rows_RN: sorted by expert.
        weight_EMN: a matrix for each expert.
        counts_E: int64, rows of each expert; they add up to R.
    """
    if rows_RN.is_meta:  # a block runs on the meta device for its shapes alone
        return rows_RN.new_empty(len(rows_RN), weight_EMN.shape[1])
    grouped = can_group(rows_RN, weight_EMN)
    product = _grouped if grouped else _loop
    if torch.compiler.is_compiling() and not (grouped and rows_RN.dtype == torch.bfloat16):
        return _uncompiled(product, rows_RN, weight_EMN, counts_E)  # torch's compiler knows no other grouped product
    return product(rows_RN, weight_EMN, counts_E)


def can_group(rows: torch.Tensor, weight_EMN: torch.Tensor) -> bool:
    """Return whether `torch.nn.functional.grouped_mm` takes these operands and can compute their gradients."""
    widths = weight_EMN.shape[1:]
    aligned = all(width * rows.element_size() % ALIGNMENT == 0 for width in widths)
    return len(rows) > 0 and aligned and rows.dtype in GROUPED and rows.dtype == weight_EMN.dtype


def _grouped(rows_RN: torch.Tensor, weight_EMN: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    offsets = counts_E.cumsum(dim=0, dtype=torch.int32)
    return F.grouped_mm(rows_RN, weight_EMN.transpose(1, 2), offs=offsets)


def _loop(rows_RN: torch.Tensor, weight_EMN: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    parts = rows_RN.split([int(count) for count in counts_E.tolist()])
    # indexing the weight in the loop would write a gradient of the whole weight for every expert
    products = [torch.bmm(part[None], matrix.t()[None])[0] for part, matrix in zip(parts, weight_EMN.unbind())]
    return torch.cat(products)


@_disable_dynamo
def _uncompiled(product: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """Call a product outside of compiled code."""
    return product(*operands)


def add_bias(rows_RF: torch.Tensor, bias_EF: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Return rows plus their experts' biases. The gradient of a bias is the sum of its rows in their order.

    Args:
        rows_RF: sorted by expert.
        bias_EF: of each expert.
        counts_E: int64, rows of each expert.
    """
    return _AddBias.apply(rows_RF, bias_EF, counts_E)


class _AddBias(torch.autograd.Function):
    """`add_bias`. The gradient of an index would be added up in any order."""

    @staticmethod
    def forward(ctx: Any, rows_RF: torch.Tensor, bias_EF: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts_E)
        ctx.dtype = bias_EF.dtype
        experts = torch.arange(len(counts_E), device=counts_E.device)
        of_row = experts.repeat_interleave(counts_E, output_size=len(rows_RF))
        return rows_RF + bias_EF.to(rows_RF.dtype)[of_row]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (gradient,) = grad_outputs
        (counts_E,) = ctx.saved_tensors
        sums = torch.segment_reduce(gradient.float().contiguous(), "sum", lengths=counts_E, initial=0.0, unsafe=True)
        return gradient, sums.to(ctx.dtype), None


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter. Ranks that hold the same one have parts of its gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    placements: Any = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return parameter.to_local(grad_placements=placements)
