"""Norms, computed in fp32 and returned in the dtype of the input."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 and returned in the dtype of x."""

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.epsilon).to(x.dtype)


class ZeroCentredRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), as in Gemma (https://arxiv.org/abs/2403.08295): weights begin at 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), 1 + self.weight.float(), self.epsilon).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * weight + bias (https://arxiv.org/abs/1607.06450)."""

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x.float(), (x.shape[-1],), self.weight.float(), self.bias.float(), self.epsilon)
        return normed.to(x.dtype)


class WidthNorm(RMSNorm):
    """RMSNorm over all heads together, as OLMo 2 normalises queries and keys (https://arxiv.org/abs/2501.00656).

    Under tensor parallelism a rank has the columns of its heads. Then `group` is set, and ranks sum their squares.
    """

    group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return super().forward(x)
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        values = x.float()
        squares = _SumOverRanks.apply(values.square().sum(dim=-1, keepdim=True), self.group)
        width = values.shape[-1] * self.group.size()
        return (values * (squares / width + self.epsilon).rsqrt() * weight.float()).to(x.dtype)


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks, in both directions: every rank's output depends on every rank's input."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        total = grad_outputs[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
