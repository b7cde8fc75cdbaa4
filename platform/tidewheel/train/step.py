"""One optimizer step, the same function of the global batch however many ranks share it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from tidewheel.train.collectives import Collectives
from tidewheel.train.parallel import local, synchronise_gradients


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and backward pass; all four tensors are [B, L]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    segment_ids: torch.Tensor
    targets: torch.Tensor
    virtual_rank: int
    num_tokens: int
    """Tokens that are not padding."""
    num_targets: int
    """Positions with something to predict."""


@dataclass(frozen=True)
class StepResult:
    """The same on every rank."""

    loss: float
    """Cross-entropy in nats per target token, over the global batch."""
    gradient_norm: float
    """Before clipping."""
    tokens: int
    """Real tokens in the global batch."""
    targets: int
    """Tokens that were predicted."""
    stop: bool
    """Rank 0 asked for a planned stop."""


def native_bf16(device: torch.device) -> bool:
    """Whether bf16 products are fast here. A CPU without AVX512-BF16 or AMX emulates them, slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def precision_context(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Autocast for the configured precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Sequence[MicroBatch],
               collectives: Collectives, *, virtual_ranks: int, clip_norm: float = 0.0, precision: str = "fp32",
               stop: bool = False) -> StepResult:
    """Forward, backward, clip, update.

    Gradients are of the SUM of token losses; after the last micro-batch they are divided by the global number of
    targets, once. Losses travel as one entry per virtual rank (disjoint, so the sum is exact and its order fixed),
    together with the counts, the squared gradient norm and rank 0's wish to stop: one small all-reduce per step.
    """
    optimizer.zero_grad(set_to_none=True)
    report, losses = torch.zeros(virtual_ranks + 4, dtype=torch.float64), []
    for number, micro in enumerate(micro_batches):
        synchronise_gradients(model, number == len(micro_batches) - 1)
        with precision_context(micro.tokens.device, precision):
            loss = model(micro.tokens, micro.positions, micro.segment_ids, micro.targets)
        loss.backward()
        losses.append(loss.detach())
        report[virtual_ranks] += micro.num_targets
        report[virtual_ranks + 1] += micro.num_tokens
    for micro, value in zip(micro_batches, torch.stack(losses).tolist()):
        report[micro.virtual_rank] += value
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    report[virtual_ranks + 2] = squared_norm(gradients)
    report[virtual_ranks + 3] = float(stop)
    report = collectives.sum(report)

    targets = max(1, int(report[virtual_ranks]))
    norm = float(report[virtual_ranks + 2].sqrt()) / targets
    scale = clip_norm / norm if 0 < clip_norm < norm else 1.0
    torch._foreach_mul_(gradients, scale / targets)
    optimizer.step()
    return StepResult(loss=float(report[:virtual_ranks].sum()) / targets, gradient_norm=norm, targets=targets,
                      tokens=int(report[virtual_ranks + 1]), stop=bool(report[virtual_ranks + 3]))


def squared_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Sum of squares over all elements, each tensor in its own precision, tensors added in fp64."""
    norms = torch._foreach_norm([t for t in tensors if t.numel()])
    return float(torch.stack([n.double() for n in norms]).square().sum()) if norms else 0.0
