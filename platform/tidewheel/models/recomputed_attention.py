"""A plan of attention from any differentiable kernel that also returns the logarithms of its softmax sums.

On CUDA the kernel is FlexAttention. Its own backward pass knows only the keys that it was given. Here it computes the
piece again, with a gradient that accounts for the other pieces: with w = exp(lse of the piece - lse of all), the output
is the sum of w times the outputs of the pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from tidewheel.models.attention import interval_blocks
from tidewheel.models.blockwise import Intervals, Scores

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scores], tuple[torch.Tensor, torch.Tensor]]
"""From (q, k, v, scores) to the output and fp32 logarithms of the softmax's sums, both differentiable."""


class RecomputedAttention:
    """Attention by a differentiable kernel; a `Plan`.

    Args:
        attend: the kernel, for this micro-batch's mask.
    """

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the logarithms of the softmax's sums; see `Plan`.

        Args:
            q: queries, [B, H, Q, E].
            k: keys, [B, K, L, E].
            v: values, [B, K, L, V].
            scores: scale and cap.
        """
        with torch.no_grad():
            out, lse = self._attend(q, k, v, scores)
        return out.float(), lse

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor,
                 delta: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v by these keys; see `Plan`.

        The gradient of the piece's output is w times that of the whole output. That of its lse is w times (gradient x
        the piece's output, summed, less `delta`).

        Args:
            grad: gradient of the output, [B, H, Q, V].
            q: see `forward`.
            k: see `forward`.
            v: see `forward`.
            lse: of the softmax over all keys, [B, H, Q].
            delta: see `Blockwise.backward`.
            scores: see `forward`.
        """
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out, own_lse = self._attend(inputs[0], inputs[1], inputs[2], scores)
        weight = (own_lse.detach() - lse).exp()
        grad_out = weight[..., None] * grad.float()
        grad_lse = (grad_out * out.detach().float()).sum(dim=-1) - weight * delta
        dq, dk, dv = torch.autograd.grad((out, own_lse), inputs, (grad_out.to(out.dtype), grad_lse))
        return dq, dk, dv


def flex_attend(seen: Intervals, keys: int) -> Attend:
    """Return FlexAttention over the keys that each query sees, for CUDA: on a CPU it has no backward pass.

    Args:
        seen: which keys each query sees.
        keys: number of keys.
    """
    blocks = interval_blocks(seen, keys)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        def capped(score: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
            return scores.cap * torch.tanh(score / scores.cap)

        flex: Any = _compiled() if q.is_cuda else flex_attention
        out, aux = flex(q, k, v, block_mask=blocks, score_mod=capped if scores.cap else None, scale=scores.scale,
                        enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True))
        return out, aux.lse

    return attend


@functools.cache
def _compiled() -> Any:
    """Compile FlexAttention; uncompiled it holds the whole score matrix."""
    return torch.compile(flex_attention)
