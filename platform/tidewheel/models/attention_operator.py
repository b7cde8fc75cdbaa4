"""Attention that the host plans for a micro-batch, as one operator of torch.

A plan holds what tensors cannot: tiles, process groups, whose keys come next. For torch.compile and for activation
checkpointing the computation of a plan is one operator, which is neither traced nor taken apart: selective
checkpointing keeps its result, and compiled code is the same for every plan. The operator gets its plan by a number in
a tensor on the CPU. The plan lives as long as that tensor, and so until the backward pass that keeps it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch

from tidewheel.models.blockwise import Scores

NAME = "tidewheel::planned_attention"


class Plan(Protocol):
    """How attention is computed for a micro-batch; see `blockwise.Blockwise` for the shapes."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [B, H, Q, V] in any dtype, and the logarithms of the softmax's sums, fp32 [B, H, Q].

        Args:
            q: [B, H, Q, E].
            k: [B, K, L, E].
            v: [B, K, L, V].
            scores: scale and cap.
        """
        ...

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor,
                 delta: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v in any dtype, by the keys that are given.

        Args:
            grad: gradient of the output, [B, H, Q, V].
            q: see `forward`.
            k: see `forward`.
            v: see `forward`.
            lse: the logarithms of the softmax's sums over all keys, [B, H, Q].
            delta: sum over V of gradient x output, less the gradient of `lse`; [B, H, Q].
            scores: see `forward`.
        """
        ...


def handle_of(plan: Plan) -> torch.Tensor:
    """Return a tensor int64 [] on the CPU that stands for a plan; the plan lives as long as its storage.

    Args:
        plan: of one micro-batch and window.
    """
    number = next(_numbers)
    handle = torch.tensor(number)
    _plans[number] = plan
    weakref.finalize(handle.untyped_storage(), _plans.pop, number)
    return handle


def planned_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: torch.Tensor,
                      scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by a plan.

    Args:
        q: [B, H, Q, E].
        k: [B, K, L, E]; head h of q uses head h // (H / K).
        v: [B, K, L, V].
        handle: of the plan.
        scores: scale and soft-capping.

    Returns:
        [B, H, Q, V] in the dtype of q, and the logarithms of the softmax's sums, fp32 [B, H, Q]. Both have gradients.
    """
    return _operator(q, k, v, handle, scores.scale, scores.cap)


_numbers = itertools.count()
_plans: dict[int, Plan] = {}


@torch.library.custom_op(NAME, mutates_args=())
def _operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: torch.Tensor, scale: float,
              cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _plans[int(handle)].forward(q, k, v, Scores(scale, cap))
    return out.to(q.dtype), lse


@_operator.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: torch.Tensor, scale: float,
      cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op(f"{NAME}_backward", mutates_args=())
def _backward_operator(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor,
                       delta: torch.Tensor, handle: torch.Tensor, scale: float,
                       cap: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = _plans[int(handle)].backward(grad, q, k, v, lse, delta, Scores(scale, cap))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@_backward_operator.register_fake
def _(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
      handle: torch.Tensor, scale: float, cap: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, handle, ctx.scale, ctx.cap = inputs
    ctx.save_for_backward(q, k, v, handle, *output)


def _gradients(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor) -> Any:
    q, k, v, handle, out, lse = ctx.saved_tensors
    delta = (grad.float() * out.float()).sum(dim=-1) - grad_lse
    dq, dk, dv = _backward_operator(grad, q, k, v, lse, delta, handle, ctx.scale, ctx.cap)
    return dq, dk, dv, None, None, None


_operator.register_autograd(_gradients, setup_context=_keep)
