"""Next-token cross-entropy, summed over targets in nats. The softmax is fp32; large logits are computed in chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from tidewheel.models.config import LossConfig
from tidewheel.models.row_losses import RowLosses

IGNORED = -100
"""Target of a position without a prediction."""
WHOLE_BYTES = 1 << 28
"""If the configuration does not say, logits up to this size in fp32 are computed at once."""
CHUNK_TOKENS = 4096
"""Number of tokens in a chunk of larger logits. Each chunk adds to the [V, D] gradient. With D = 2048 and fewer tokens
this addition costs more than a tenth of the chunk's matrix products on an H200."""
GPU_CHUNK_TOKENS = 8192
"""The same number on a GPU, whose compiled gradients need no fp32 logits: as many bytes, half the additions."""

CrossEntropy = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""From logits [N, V], targets [N] and the weight of the z-loss to the sum of token losses, an fp32 scalar."""
Observe = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with a chunk of logits [N, V] and its targets [N]."""
TokenGradients = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""From the same arguments to the sum and its gradient with respect to the logits [N, V]."""


class TokenLoss(nn.Module):
    """The sum of token losses of hidden states. It is a module so that loss parallelism can replace it.

    It returns the cross-entropy alone. The z-loss acts through the gradient only, so that losses stay comparable.

    Args:
        config: settings of the cross-entropy.
        soft_cap: of the model's logits, see `soft_capped`.
    """

    def __init__(self, config: LossConfig, soft_cap: float | None = None) -> None:
        super().__init__()
        self.config, self.soft_cap = config, soft_cap
        self.rows: RowLosses | None = None

    def forward(self, x_BLD: torch.Tensor, output: Callable[[torch.Tensor], torch.Tensor], weight_VD: torch.Tensor,
                targets_BL: torch.Tensor) -> torch.Tensor:
        """Return the sum over targets that are not `IGNORED`, an fp32 scalar.

        Args:
            x_BLD: normalised hidden states.
            output: computes logits [B, L, V], x @ weight.T and soft-capped; called only if all may exist at once.
            weight_VD: output matrix.
            targets_BL: int64.
        """
        rows = chunk_rows(targets_BL.numel(), weight_VD.shape[0], self.config.chunk_tokens, x_BLD.device)
        observe = None
        if self.rows is not None:
            self.rows.begin()
            observe = self._observe
        if rows == targets_BL.numel():
            logits, targets = output(x_BLD).flatten(0, -2), targets_BL.flatten()
            if observe is not None:
                observe(logits, targets)
            return cross_entropy(logits, targets, self.config.z_loss)
        return linear_cross_entropy(x_BLD.flatten(0, -2), weight_VD, targets_BL.flatten(), rows=rows,
                                    z_loss=self.config.z_loss, soft_cap=self.soft_cap, observe=observe)

    def _observe(self, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> None:
        assert self.rows is not None
        nats = _compiled_nats() if logits_NV.is_cuda else token_nats
        self.rows.add(nats(logits_NV.detach(), targets_N))


def soft_capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return cap tanh(logits / cap), computed in fp32, in the dtype of the logits; without a cap the logits themselves.

    Gemma 2 bounds its logits so (https://arxiv.org/abs/2408.00118, section 2).
    """
    return logits if cap is None else (cap * torch.tanh(logits.float() / cap)).to(logits.dtype)


def chunk_rows(tokens: int, vocabulary_size: int, chunk_tokens: int | None,
               device: torch.device | None = None) -> int:
    """Return the number of tokens in a chunk; `tokens` if all logits may exist at once.

    Chunks are nearly equal, so that few shapes occur.

    Args:
        tokens: in the micro-batch.
        vocabulary_size: columns of the logits on this rank.
        chunk_tokens: setting `objective.chunk_tokens`.
        device: that computes; default: a CPU.
    """
    if chunk_tokens is None:
        large = GPU_CHUNK_TOKENS if device is not None and device.type == "cuda" else CHUNK_TOKENS
        chunk_tokens = 0 if tokens * vocabulary_size * 4 <= WHOLE_BYTES else large
    if not chunk_tokens or chunk_tokens >= tokens:
        return tokens
    return -(-tokens // -(-tokens // chunk_tokens))


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of matrix products of `x`: autocast's if it is enabled, else that of `x`."""
    kind = x.device.type
    lowered = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if lowered else x.dtype


def cross_entropy(logits_NV: torch.Tensor, targets_N: torch.Tensor, z_loss: float = 0.0) -> torch.Tensor:
    """Return the sum of token losses, an fp32 scalar; the softmax is fp32.

    Args:
        logits_NV: whole logits.
        targets_N: int64; `IGNORED` adds nothing.
        z_loss: weight of the z-loss in the gradient.
    """
    logits = logits_NV.float()
    loss = F.cross_entropy(logits, targets_N, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        normalisers = logits.logsumexp(dim=-1)
        penalty = z_loss * normalisers.square().masked_fill(targets_N == IGNORED, 0.0).sum()
        loss = loss + penalty - penalty.detach()
    return loss


def linear_cross_entropy(x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, *, rows: int,
                         z_loss: float = 0.0, cross_entropy: CrossEntropy = cross_entropy,
                         gradients: TokenGradients | None = None, soft_cap: float | None = None,
                         observe: Observe | None = None) -> torch.Tensor:
    """Return `cross_entropy` of x @ weight.T, with the logits of `rows` tokens at a time.

    The gradient of a chunk is computed in the forward pass, while its logits exist, so nothing is computed twice (as in
    Liger Kernel, https://arxiv.org/abs/2410.10989). The weight's gradient occupies memory until the backward pass.
    In fp16 the logits are computed again in the backward pass: gradients of tokens would underflow without the loss
    scale, which is known only there.

    Args:
        x_ND: normalised hidden states.
        weight_VD: output matrix.
        targets_N: int64.
        rows: tokens of a chunk.
        z_loss: weight of the z-loss.
        cross_entropy: of a chunk of logits; loss parallelism has its own.
        gradients: default: `token_gradients`; loss parallelism has its own.
        soft_cap: of the logits, see `soft_capped`.
        observe: is called with each chunk of logits, soft-capped.
    """
    dtype = product_dtype(x_ND)
    if gradients is None:
        gradients = _compiled_gradients() if x_ND.is_cuda else token_gradients
    if soft_cap is not None:
        cross_entropy, gradients = _of_capped(cross_entropy, soft_cap), _gradients_of_capped(gradients, soft_cap)
        observe = observe and _observing_capped(observe, soft_cap)
    if dtype == torch.float16 and torch.is_grad_enabled():
        if observe is not None:
            for x, targets in zip(x_ND.detach().split(rows), targets_N.split(rows)):
                observe(F.linear(x, weight_VD.detach()), targets)

        def of(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return cross_entropy(F.linear(x, weight_VD), targets, z_loss)

        parts = [checkpoint(of, x, targets, use_reentrant=False, preserve_rng_state=False)
                 for x, targets in zip(x_ND.split(rows), targets_N.split(rows))]
        return torch.stack(parts).sum()
    needs_gradient = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    return _LinearCrossEntropy.apply(x_ND, weight_VD, targets_N, rows, z_loss, dtype, needs_gradient, cross_entropy,
                                     gradients, observe)


def _observing_capped(observe: Observe, cap: float) -> Observe:
    """Return a function of the logits before soft-capping that calls `observe` with those after it."""
    def observing(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> None:
        observe(soft_capped(logits_NV, cap), targets_N)

    return observing


def _of_capped(cross_entropy: CrossEntropy, cap: float) -> CrossEntropy:
    """Return the cross-entropy of soft-capped logits, as a function of the logits before."""
    def capped(logits_NV: torch.Tensor, targets_N: torch.Tensor, z_loss: float) -> torch.Tensor:
        return cross_entropy(soft_capped(logits_NV, cap), targets_N, z_loss)

    return capped


def _gradients_of_capped(gradients: TokenGradients, cap: float) -> TokenGradients:
    """Return the gradients with respect to the logits before soft-capping: those after it times 1 - tanh^2."""
    def capped(logits_NV: torch.Tensor, targets_N: torch.Tensor, z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
        bounded = torch.tanh(logits_NV.float() / cap)
        loss, gradient = gradients((cap * bounded).to(logits_NV.dtype), targets_N, z_loss)
        return loss, (gradient.float() * (1 - bounded.square())).to(logits_NV.dtype)

    return capped


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, rows: int,
                z_loss: float, dtype: torch.dtype, needs_gradient: bool, cross_entropy: CrossEntropy,
                gradients: TokenGradients, observe: Observe | None) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        x_gradient = torch.empty_like(x_ND) if needs_gradient else None
        weight_gradient = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_gradient else None
        with without_autocast(x_ND.device.type):
            weight = weight_VD.to(dtype)
            for first in range(0, len(x_ND), rows):
                part = slice(first, first + rows)
                x, targets = x_ND[part].to(dtype), targets_N[part]
                logits = F.linear(x, weight)
                if observe is not None:
                    observe(logits, targets)
                if x_gradient is None or weight_gradient is None:
                    loss += cross_entropy(logits, targets, 0.0)
                    continue
                value, gradient = gradients(logits, targets, z_loss)
                loss += value
                x_gradient[part] = gradient @ weight
                add_product(weight_gradient, gradient, x)
        ctx.save_for_backward(x_gradient, weight_gradient)
        ctx.scaled = False
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (scale,) = grad_outputs
        x_gradient, weight_gradient = ctx.saved_tensors
        # Scale in place without autograd: a second gradient of this size would be too large. A zero-bubble pipeline
        # calls this again for the weights, with the same scale.
        if not ctx.scaled:
            x_gradient.data.mul_(scale)
            weight_gradient.data.mul_(scale)
            ctx.scaled = True
        return x_gradient, weight_gradient, *[None] * 8


def without_autocast(kind: str) -> AbstractContextManager[None]:
    """Return a context without autocast, on any type of device; the meta device has none.

    Args:
        kind: type of the device.
    """
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def token_gradients(logits_NV: torch.Tensor, targets_N: torch.Tensor,
                    z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of token losses, an fp32 scalar, and its gradient with respect to the logits, in their dtype.

    The gradient includes the z-loss: d/dlogits of (lse - logits[target]) + z lse^2 is
    softmax (1 + 2 z lse) - onehot(target).

    Args:
        logits_NV: whole logits.
        targets_N: int64.
        z_loss: weight z of the z-loss.
    """
    logits, known = logits_NV.float(), targets_N != IGNORED
    safe = targets_N.clamp(min=0)
    normalisers = logits.logsumexp(dim=-1)
    loss = (normalisers - logits.gather(1, safe[:, None])[:, 0]).masked_fill(~known, 0.0).sum()
    gradient = (logits - normalisers[:, None]).exp()
    if z_loss:
        gradient = gradient * (1 + 2 * z_loss * normalisers)[:, None]
    gradient = minus_one(gradient, safe, known)
    return loss, gradient.masked_fill_(~known[:, None], 0.0).to(logits_NV.dtype)


def token_nats(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token, fp32 [N]; 0 without a target.

    Args:
        logits_NV: whole logits.
        targets_N: int64.
    """
    logits, known = logits_NV.float(), targets_N != IGNORED
    of_targets = logits.gather(1, targets_N.clamp(min=0)[:, None])[:, 0]
    return (logits.logsumexp(dim=-1) - of_targets).masked_fill(~known, 0.0)


def minus_one(values_NV: torch.Tensor, columns_N: torch.Tensor, marked_N: torch.Tensor) -> torch.Tensor:
    """Return `values` with 1 subtracted in one column of each marked row.

    Compiled code compares column numbers, which fuses with the operations around it: a scatter needs its target in
    memory, an fp32 buffer of the size of the logits. Without a compiler the scatter, in place, is cheaper. Both give
    the same bits.

    Args:
        values_NV: changed in place if the code is not compiled.
        columns_N: int64.
        marked_N: bool.
    """
    if torch.compiler.is_compiling():
        numbers = torch.arange(values_NV.shape[1], device=values_NV.device)
        hit = (numbers == columns_N[:, None]) & marked_N[:, None]
        return values_NV - hit.to(values_NV.dtype)
    return values_NV.scatter_add_(1, columns_N[:, None], -marked_N[:, None].to(values_NV.dtype))


def add_product(total_VD: torch.Tensor, a_NV: torch.Tensor, b_ND: torch.Tensor) -> None:
    """Add a.T @ b to an fp32 matrix in place, with the product in fp32 if the device can.

    Args:
        total_VD: fp32.
        a_NV: of any dtype of `product_dtype`.
        b_ND: of the same dtype.
    """
    if a_NV.dtype == torch.float32:
        total_VD.addmm_(a_NV.T, b_ND)
    elif sums_in_fp32(total_VD.device, a_NV.dtype):
        torch.addmm(total_VD, a_NV.T, b_ND, out_dtype=torch.float32, out=total_VD)
    else:
        total_VD += a_NV.T @ b_ND


@functools.cache
def sums_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device adds a 16-bit product to an fp32 matrix in one operation.

    CUDA does from torch 2.11 on. A small product is tried, because the rules for dtypes changed between releases.

    Args:
        device: of the matrices.
        dtype: of the factors.
    """
    if device.type == "meta":
        return False
    with _disable_current_modes(), torch.no_grad():  # fake tensors have no values to compare
        total = torch.ones(16, 16, device=device)
        factor = torch.ones(16, 16, device=device, dtype=dtype)
        try:
            torch.addmm(total, factor.T, factor, out_dtype=torch.float32, out=total)
        except (RuntimeError, TypeError):  # no kernel for this device, or other dtypes are asked for
            return False
        return bool((total == 17).all())


@functools.cache
def _compiled_gradients() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return `token_gradients` compiled, which reads the logits in a few passes instead of ten."""
    return torch.compile(token_gradients)


@functools.cache
def _compiled_nats() -> Callable[..., torch.Tensor]:
    """Return `token_nats` compiled, which needs no fp32 buffer of the size of the logits."""
    return torch.compile(token_nats)
