"""Next-token cross entropy: the SUM over targets in nats, fp32 softmax, without whole logits where they are large."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tidewheel.models.config import LossConfig

IGNORED = -100
"""Target of a position that has nothing to predict."""
WHOLE_BYTES = 1 << 28
"""Logits up to this size in fp32 are computed at once, the plain way, when the configuration does not say."""
CHUNK_TOKENS = 4096
"""Otherwise so many tokens at a time. With D = 2048 each chunk adds to a [V, D] gradient; fewer tokens and that
addition would cost more than a tenth of the chunk's matrix products on an H200."""

CrossEntropy = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Logits [N, V], targets [N] and the weight of the z-loss to the sum of token losses."""
TokenGradients = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""The same to the sum and its gradient by the logits."""


class TokenLoss(nn.Module):
    """Hidden states to the sum of token losses. A module of its own, so that loss-parallel can take its place.

    What it returns is the cross entropy alone; z-loss acts through the gradient only, so that losses stay comparable.
    """

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x_BLD: torch.Tensor, output: Callable[[torch.Tensor], torch.Tensor], weight_VD: torch.Tensor,
                targets_BL: torch.Tensor) -> torch.Tensor:
        """The sum over targets that are not `IGNORED`, fp32, a scalar.

        Args:
            x_BLD: normalised hidden states.
            output: makes [B, L, V] logits of them: x @ weight.T; called only when they may exist whole.
            weight_VD: the output matrix.
            targets_BL: int64.
        """
        rows = chunk_rows(targets_BL.numel(), weight_VD.shape[0], self.config.chunk_tokens)
        if rows == targets_BL.numel():
            return cross_entropy(output(x_BLD).flatten(0, -2), targets_BL.flatten(), self.config.z_loss)
        return linear_cross_entropy(x_BLD.flatten(0, -2), weight_VD, targets_BL.flatten(), rows=rows,
                                    z_loss=self.config.z_loss)


def chunk_rows(tokens: int, vocabulary_size: int, wanted: int | None) -> int:
    """Tokens of one chunk; `tokens` itself: logits may be whole. Chunks are nearly equal, so that shapes are few."""
    if wanted is None:
        wanted = 0 if tokens * vocabulary_size * 4 <= WHOLE_BYTES else CHUNK_TOKENS
    if not wanted or wanted >= tokens:
        return tokens
    return -(-tokens // -(-tokens // wanted))


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The type in which matrix products of `x` are computed: autocast's, or its own."""
    kind = x.device.type
    lowered = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if lowered else x.dtype


def cross_entropy(logits_NV: torch.Tensor, targets_N: torch.Tensor, z_loss: float = 0.0) -> torch.Tensor:
    """The sum of token losses of whole logits; the softmax in fp32."""
    logits = logits_NV.float()
    loss = F.cross_entropy(logits, targets_N, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        normalisers = logits.logsumexp(dim=-1)
        penalty = z_loss * normalisers.square().masked_fill(targets_N == IGNORED, 0.0).sum()
        loss = loss + penalty - penalty.detach()
    return loss


def linear_cross_entropy(x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, *, rows: int,
                         z_loss: float = 0.0, cross_entropy: CrossEntropy = cross_entropy,
                         gradients: TokenGradients | None = None) -> torch.Tensor:
    """`cross_entropy` of x @ weight.T, the logits of `rows` tokens at a time.

    Loss-parallel gives a `cross_entropy` of its own, and `gradients` in the place of `token_gradients`.

    The gradient of a chunk is taken while its logits are there, in the forward pass, so that nothing is computed twice
    (as in Liger Kernel, https://arxiv.org/abs/2410.10989); it costs the memory of the weight's gradient until backward.
    In fp16 the logits are computed again in the backward pass: only there is the loss scale known, without which
    gradients of tokens are lost to underflow.
    """
    dtype = product_dtype(x_ND)
    if dtype == torch.float16 and torch.is_grad_enabled():
        def of(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return cross_entropy(F.linear(x, weight_VD), targets, z_loss)

        parts = [checkpoint(of, x, targets, use_reentrant=False, preserve_rng_state=False)
                 for x, targets in zip(x_ND.split(rows), targets_N.split(rows))]
        return torch.stack(parts).sum()
    wanted = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    if gradients is None:
        gradients = _compiled_gradients() if x_ND.is_cuda else token_gradients
    return _LinearCrossEntropy.apply(x_ND, weight_VD, targets_N, rows, z_loss, dtype, wanted, cross_entropy, gradients)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, rows: int,
                z_loss: float, dtype: torch.dtype, wanted: bool, cross_entropy: CrossEntropy,
                gradients: TokenGradients) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        x_gradient = torch.empty_like(x_ND) if wanted else None
        weight_gradient = torch.zeros_like(weight_VD, dtype=torch.float32) if wanted else None
        with torch.autocast(x_ND.device.type, enabled=False):
            weight = weight_VD.to(dtype)
            for first in range(0, len(x_ND), rows):
                part = slice(first, first + rows)
                x, targets = x_ND[part].to(dtype), targets_N[part]
                logits = F.linear(x, weight)
                if x_gradient is None or weight_gradient is None:
                    loss += cross_entropy(logits, targets, 0.0)
                    continue
                value, gradient = gradients(logits, targets, z_loss)
                loss += value
                x_gradient[part] = gradient @ weight
                if dtype == torch.float32:
                    weight_gradient.addmm_(gradient.T, x)
                else:
                    weight_gradient += gradient.T @ x
        ctx.save_for_backward(x_gradient, weight_gradient)
        ctx.scaled = False
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (scale,) = grad_outputs
        x_gradient, weight_gradient = ctx.saved_tensors
        # In place, behind autograd's back: one such gradient is large enough. A zero-bubble pipeline comes a second
        # time, for the weights, with the same scale.
        if not ctx.scaled:
            x_gradient.data.mul_(scale)
            weight_gradient.data.mul_(scale)
            ctx.scaled = True
        return x_gradient, weight_gradient, *[None] * 7


def token_gradients(logits_NV: torch.Tensor, targets_N: torch.Tensor,
                    z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of token losses, fp32, and its gradient by the logits in their dtype (with that of the z-loss).

    d/dlogits of (lse - logits[target]) + z lse^2 is softmax (1 + 2 z lse) - onehot(target).
    """
    logits, known = logits_NV.float(), targets_N != IGNORED
    safe = targets_N.clamp(min=0)[:, None]
    normalisers = logits.logsumexp(dim=-1)
    loss = (normalisers - logits.gather(1, safe)[:, 0]).masked_fill(~known, 0.0).sum()
    gradient = (logits - normalisers[:, None]).exp()
    if z_loss:
        gradient = gradient * (1 + 2 * z_loss * normalisers)[:, None]
    gradient.scatter_add_(1, safe, gradient.new_full((1, 1), -1.0).expand_as(safe))
    return loss, gradient.masked_fill_(~known[:, None], 0.0).to(logits_NV.dtype)


@functools.cache
def _compiled_gradients() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Fused: the softmax and its gradient in few passes over the logits instead of ten."""
    return torch.compile(token_gradients)
