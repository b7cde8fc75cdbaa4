"""Load balancing of experts: two losses that enter through their gradients, and the update of the selection bias.

The losses are sums over tokens, as the training loss is: they add up over micro-batches and do not depend on the number
of workers. The reported loss does not contain them.
"""

from __future__ import annotations

from typing import Any

import torch


def auxiliary_loss(shares_TE: torch.Tensor, counts_E: torch.Tensor, weight: float) -> torch.Tensor:
    """Return the load-balancing loss, an fp32 scalar: weight x sum over tokens and experts of f_e x share.

    f_e is the load of expert e over the mean load (https://arxiv.org/abs/2101.03961 equation 4, divided by the number
    of experts of a token as in https://arxiv.org/abs/2405.04434 equation 24). It has no gradient.

    Args:
        shares_TE: scores of this rank's tokens, normalised to sum 1.
        counts_E: int64, tokens of each expert in the whole micro-batch.
        weight: of the loss.
    """
    load_E = counts_E * (len(counts_E) / counts_E.sum().clamp(min=1))
    return weight * (shares_TE.sum(dim=0) * load_E.to(shares_TE.dtype)).sum()


def z_loss(logits_TE: torch.Tensor, weight: float) -> torch.Tensor:
    """Return weight x the sum over tokens of the squared log-normaliser (https://arxiv.org/abs/2202.08906 equation 5).

    Args:
        logits_TE: of the router, fp32.
        weight: of the loss.
    """
    return weight * logits_TE.logsumexp(dim=-1).square().sum()


def with_loss(values: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return `values`, whose backward pass also computes the gradient of `scale` x `loss`.

    So a layer adds a loss without a path to the output: a pipeline stage or a recomputed block may hold it
    (Megatron-LM's MoEAuxLossAutoScaler does the same).

    Args:
        values: any tensor that the training loss depends on.
        loss: a scalar.
        scale: factor of the loss.
    """
    return _WithLoss.apply(values, loss, scale)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
        ctx.scale = scale
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return grad_outputs[0], torch.ones_like(loss) * ctx.scale, None


def moved_bias(bias_LE: torch.Tensor, counts_LE: torch.Tensor, rate: float) -> torch.Tensor:
    """Return the selection biases after a step: each moves by `rate` against the sign of its expert's overload.

    Then each layer's mean is subtracted, which changes no choice but stops a drift (https://arxiv.org/abs/2408.15664
    algorithm 1; the centring is torchtitan's).

    Args:
        bias_LE: fp32, of each layer.
        counts_LE: tokens of each expert in the step, over all ranks; whole numbers of any dtype.
        rate: size of a step.
    """
    counts = counts_LE.double()
    direction = torch.sign(counts.mean(dim=-1, keepdim=True) - counts).to(bias_LE.dtype)
    moved = bias_LE + rate * direction
    return moved - moved.mean(dim=-1, keepdim=True)
