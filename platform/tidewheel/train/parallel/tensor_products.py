"""Matrix products at the edges of a tensor-parallel layer, with the collectives that they need.

Between layers each rank has the activations of its own positions, [B, L/T, D]. A product with matrices sharded by
columns gathers all positions first; a product with a matrix sharded by rows is a sum over ranks, of which each keeps
its own positions (sequence parallelism, https://arxiv.org/abs/2205.05198, section 4.2.2).

Activations are gathered in the dtype of the products: rounding before the gather gives the bits of rounding after it,
and a residual stream in fp32 is twice as large. Their gradients are summed over ranks in the residual stream's dtype.

The asynchronous products use torch's operators `symm_mem::fused_all_gather_matmul` and `fused_matmul_reduce_scatter`
(https://discuss.pytorch.org/t/209487). They cut a product into one part for each rank, and copy a part through
symmetric memory while another one is computed. They are called here and not left to inductor's pass
(`_micro_pipeline_tp`), which needs compilation and finds two of the eight collectives of a block
(`python -m tests.benchmarks.tensor_collectives --pass`).

Suffixes of names give shapes: B rows, L positions, T ranks, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from tidewheel.models.adapting.nf4 import Nf4Linear
from tidewheel.models.loss import product_dtype
from tidewheel.models.products import Products, local, side_by_side, split

OPERATORS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
"""Operators of torch's namespace `symm_mem` that asynchronous products need."""


@dataclass(frozen=True)
class ColumnProducts(Products):
    """Products with matrices sharded by columns; replaces `Products`. The input has this rank's positions.

    Args:
        group: name of the tensor-parallel process group.
        size: its number of ranks.
        asynchronous: overlap the gather with the products.
    """

    group: str = ""
    size: int = 1
    asynchronous: bool = False

    def __call__(self, x: torch.Tensor, layers: Sequence[nn.Linear]) -> Sequence[torch.Tensor]:
        """Return this rank's part of the output of each layer, of all positions: [B, L, outputs / T].

        Args:
            x: [B, L/T, D], plain or a DTensor.
            layers: linear layers with D inputs; all have a bias, or none has.
        """
        x_BLD = local(x)
        dtype = product_dtype(x_BLD)
        if not self.asynchronous:
            gathered: torch.Tensor = _Gather.apply(x_BLD, dtype, self.group, self.size)
            if self.fused:
                weight, bias = side_by_side(layers, dtype)
                return split(F.linear(gathered, weight, bias), layers)
            return [self._product(gathered, layer) for layer in layers]
        if self.fused:
            weight, bias = side_by_side(layers, dtype)
            (out,) = _GatherProducts.apply(x_BLD.to(dtype), self.group, weight)
            return split(out if bias is None else out + bias, layers)
        weights = [local(layer.weight).to(dtype) for layer in layers]
        outputs = _GatherProducts.apply(x_BLD.to(dtype), self.group, *weights)
        biases = [_local_bias(layer) for layer in layers]
        return [out if bias is None else out + bias.to(dtype) for out, bias in zip(outputs, biases)]

    @staticmethod
    def _product(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        """Return this rank's part of a layer's output, through its adapter if it has one."""
        def base(x: torch.Tensor) -> torch.Tensor:
            if isinstance(layer, Nf4Linear):
                bias = _local_bias(layer)
                return layer.product(x) if bias is None else layer.product(x) + bias.to(x.dtype)
            return F.linear(x, local(layer.weight), _local_bias(layer))

        adapter: Any = None if getattr(layer, "adapter_is_off", False) else getattr(layer, "adapter", None)
        return base(x) if adapter is None else adapter(layer, base, x)


class AsynchronousRows(ParallelStyle):
    """Shards a linear layer by rows and overlaps its product with the reduce-scatter of the result.

    The layer's output has this rank's positions, [B, L/T, D].
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        module.weight = _distributed(module.weight, device_mesh, Shard(1))
        if module.bias is not None:
            module.bias = _distributed(module.bias, device_mesh, Replicate())
        module.__class__ = _RowLinear  # a new `forward` for each layer would be compiled again for every block
        cast(_RowLinear, module).tensor_group = device_mesh.get_group().group_name
        return module


class _RowLinear(nn.Linear):
    tensor_group: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = product_dtype(x)
        out: torch.Tensor = _ProductScatter.apply(x.to(dtype), local(self.weight).to(dtype), self.tensor_group)
        if self.bias is None:
            return out
        bias: Any = self.bias
        return out + bias.to_local(grad_placements=[Partial()]).to(dtype)  # each rank adds it to its own positions


class _Gather(torch.autograd.Function):
    """All positions [B, L, D] of [B, L/T, D], rounded to `dtype`, in the dtype of the input.

    The backward pass sums the gradient over the ranks in the dtype of the input.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype, group: str, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        ranks = torch.ops._c10d_functional.all_gather_into_tensor(x.to(dtype).contiguous(), size, group)
        ranks = torch.ops._c10d_functional.wait_tensor(ranks)
        return ranks.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (grad,) = grad_outputs
        ranks = grad.unflatten(1, (ctx.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        own = torch.ops._c10d_functional.reduce_scatter_tensor(ranks, "sum", ctx.size, ctx.group)
        return torch.ops._c10d_functional.wait_tensor(own), None, None, None


class _GatherProducts(torch.autograd.Function):
    """The products of all positions with each matrix. x and the matrices have one dtype.

    The gathered input is kept for the weights' gradients, as the products that are not asynchronous keep it; gathering
    it again would add half as many bytes to the backward pass as it has. Activation checkpointing trades them. The
    gradient of the input is one product with all matrices side by side: it sums them in the product's accumulator and
    scatters once.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered, outputs = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t() for weight in weights], 1, group)
        ctx.group = group
        ctx.save_for_backward(gathered, *weights)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        gathered, *weights = ctx.saved_tensors
        grad = torch.cat(grad_outputs, dim=-1)
        own = torch.ops.symm_mem.fused_matmul_reduce_scatter(grad, torch.cat(weights), "sum", 1, ctx.group)
        return own, None, *(_weight_gradient(grad, gathered) for grad in grad_outputs)


class _ProductScatter(torch.autograd.Function):
    """This rank's positions of the sum over ranks of x @ weight.T."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        own: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 1, group)
        return own

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gathered, (grad,) = torch.ops.symm_mem.fused_all_gather_matmul(grad_outputs[0], [weight], 1, ctx.group)
        return grad, _weight_gradient(gathered, x), None


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient [outputs, inputs] of a matrix from that of its output and from its input."""
    return grad.flatten(0, 1).t() @ x.flatten(0, 1)


def _local_bias(layer: nn.Linear) -> torch.Tensor | None:
    return None if layer.bias is None else local(layer.bias)


def _distributed(parameter: torch.Tensor, mesh: DeviceMesh, placement: Shard | Replicate) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None))
