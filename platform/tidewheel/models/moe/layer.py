"""The mixture-of-experts layer, a block's feed-forward: route, sort rows by expert, compute, gather and weigh.

Suffixes of names give shapes: B rows, L positions, T tokens, K slots of a token, R slots with an expert, E experts,
D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from tidewheel.models.blocks.feed_forward import SwiGLU
from tidewheel.models.loss import product_dtype
from tidewheel.models.moe.config import MixtureOfExperts
from tidewheel.models.moe.experts import Experts
from tidewheel.models.moe.router import Choice, Router, Routing

Dispatch = Callable[[Experts, torch.Tensor, torch.Tensor], torch.Tensor]
"""From (experts, rows [R, D] sorted by expert, counts int64 [E] of all experts) to the experts' outputs [R, D]."""


class MoE(nn.Module):
    """Routed experts and, if the model has some, shared experts: x [B, L, D] -> (output [B, L, D], `Routing`).

    Args:
        config: the model family's settings.
    """

    def __init__(self, config: MixtureOfExperts) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.num_experts, config.dim, config.expert_width, bias=config.EXPERT_BIAS,
                               activation=config.ACTIVATION)
        inner = config.shared_experts * config.expert_width
        self.shared = SwiGLU(config.dim, inner, fused=config.fused_products) if inner else None
        self.dispatch: Dispatch = lambda experts, rows_RD, counts_E: experts(rows_RD, counts_E[None])
        """Computes all rows; expert parallelism replaces it."""
        self.reduce: Callable[[torch.Tensor], torch.Tensor] = lambda out: out
        """Adds up the outputs of ranks that have a part of each expert; tensor parallelism replaces it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """Return the weighted sum of each token's experts, and what to report of the routing.

        The sum is in fp32 and in gate order, so its bits do not depend on where experts are computed. Under tensor
        parallelism x is a replicated DTensor, and the output has this rank's positions.
        """
        shared = None if self.shared is None else self.shared(x)
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[Partial()])
        x_TD = x.reshape(-1, x.shape[-1])
        choice, routing = self.router(x_TD)
        order = row_order(choice)
        rows_RD = _Copy.apply(x_TD.to(product_dtype(x)), *order)
        computed_RD = self.dispatch(self.experts, rows_RD, routing.counts)
        out = self.reduce(_Combine.apply(computed_RD, choice.weights, *order).to(x.dtype).view_as(x))
        return (out if shared is None else out + shared), routing


class RowOrder(NamedTuple):
    """Where the slots of tokens are among the rows.

    Args:
        slot_of_row: int64 [R], index of each row's slot in [T x K], sorted by expert, then by token.
        row_of_slot: int64 [T, K]; R where a slot has no expert.
    """

    slot_of_row: torch.Tensor
    row_of_slot: torch.Tensor


def row_order(choice: Choice) -> RowOrder:
    """Return the stable order of slots by expert.

    The order of rows inside an expert is that of tokens in every layout, because a weight gradient adds them up.

    Args:
        choice: from the router.
    """
    slots = choice.experts.flatten().argsort(stable=True)
    rows = torch.empty_like(slots)
    rows[slots] = torch.arange(len(slots), device=slots.device)  # a permutation: every element is written once
    if choice.rows < len(slots):
        rows = rows.clamp(max=choice.rows)
    return RowOrder(slots[:choice.rows], rows.view_as(choice.experts))


class _Copy(torch.autograd.Function):
    """A token's row for each of its experts. The gradient is a gather and a sum in gate order, no accumulation."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, slot_of_row: torch.Tensor, row_of_slot: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_of_slot)
        return x_TD.index_select(0, _tokens(slot_of_row, row_of_slot))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (row_of_slot,) = ctx.saved_tensors
        gradient = _extended(grad_outputs[0], row_of_slot)
        first, *others = row_of_slot.unbind(dim=1)
        total = gradient.index_select(0, first).float()
        for rows in others:
            total += gradient.index_select(0, rows)
        return total.to(gradient.dtype), None, None


class _Combine(torch.autograd.Function):
    """The sum over slots of weight x row, fp32 [T, D], in gate order."""

    @staticmethod
    def forward(ctx: Any, rows_RD: torch.Tensor, weights_TK: torch.Tensor, slot_of_row: torch.Tensor,
                row_of_slot: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_RD, weights_TK, slot_of_row, row_of_slot)
        rows = _extended(rows_RD, row_of_slot)
        total = torch.zeros(len(weights_TK), rows.shape[1], dtype=torch.float32, device=rows.device)
        for at, weight in zip(row_of_slot.unbind(dim=1), weights_TK.unbind(dim=1)):
            total.addcmul_(rows.index_select(0, at).float(), weight[:, None])
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        rows_RD, weights_TK, slot_of_row, row_of_slot = ctx.saved_tensors
        of_row = grad_outputs[0].index_select(0, _tokens(slot_of_row, row_of_slot))
        by_row = torch.linalg.vecdot(of_row, rows_RD.float())
        to_weights = _extended(by_row[:, None], row_of_slot)[row_of_slot.flatten(), 0].view_as(weights_TK)
        to_rows = of_row.mul_(weights_TK.flatten()[slot_of_row, None]).to(rows_RD.dtype)
        return to_rows, to_weights, None, None


def _tokens(slot_of_row: torch.Tensor, row_of_slot: torch.Tensor) -> torch.Tensor:
    """Return the token of each row, int64 [R]."""
    return slot_of_row.div(row_of_slot.shape[1], rounding_mode="floor")


def _extended(rows: torch.Tensor, row_of_slot: torch.Tensor) -> torch.Tensor:
    """Return rows followed by one of zeros for slots without an expert, if there are any."""
    return rows if len(rows) == row_of_slot.numel() else torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
