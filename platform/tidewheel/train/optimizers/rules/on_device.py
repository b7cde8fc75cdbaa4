"""Updates whose gradient scale, and whether they happen at all, are known on the device only.

A rule with `fused` follows the protocol of torch's fused optimizers, which `torch.amp.GradScaler` uses too:
`_step_supports_amp_scaling` is set, `grad_scale` divides the gradients, and a `found_inf` that is not zero withholds
the update. The host reads neither of them. The rule divides in its own update, so no extra pass over the gradients is
made, and a withheld update leaves every bit of parameters and state as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any, ParamSpec

import torch
from torch.distributed.tensor import DTensor

P = ParamSpec("P")


def kernel(*, dynamic: bool = True) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator for an element-wise function that changes its arguments in place.

    The function is one compiled kernel on a GPU. On CPU it runs as it is, because compiling takes too long there. It
    does nothing if its first argument is empty, as on a rank without rows of a parameter.

    Args:
        dynamic: whether one compilation serves all shapes.
    """
    def decorator(function: Callable[P, None]) -> Callable[P, None]:
        @wraps(function)
        def run(*arguments: P.args, **named: P.kwargs) -> None:
            first: Any = arguments[0]
            if first.numel():
                (_compiled(function, dynamic) if _compiles(first.device) else function)(*arguments, **named)

        return run
    return decorator


def _compiles(device: torch.device) -> bool:
    return device.type != "cpu"


@cache
def _compiled(function: Callable[..., None], dynamic: bool) -> Callable[..., None]:
    from torch._dynamo.utils import disable_cache_limit

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)

    def run(*arguments: Any, **named: Any) -> None:
        with disable_cache_limit():  # as torchao does: there are only as many variants as shapes and settings
            compiled(*arguments, **named)

    return run


def scale_and_skip(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what divides the gradients, a fp32 scalar, and whether to withhold the update, a bool scalar.

    Args:
        optimizer: whose `grad_scale` and `found_inf` the caller of `step` has set; None or absent: 1 and False.
        device: device of the result.
    """
    scale, skip = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    scale = torch.ones((), device=device) if scale is None else scale.to(device, non_blocking=True)
    skip = torch.zeros((), device=device) if skip is None else skip.to(device, non_blocking=True)
    return scale, skip != 0


def groups_to_update(optimizer: torch.optim.Optimizer) -> Iterator[
        tuple[dict[str, Any], list[Any], torch.Tensor, torch.Tensor]]:
    """Yield each group that has gradients, its parameters with one, and `scale_and_skip` on their device.

    Args:
        optimizer: whose groups are updated.
    """
    for group in optimizer.param_groups:
        held = [parameter for parameter in group["params"] if parameter.grad is not None]
        if held:
            scale, skip = scale_and_skip(optimizer, local(held[0]).device)
            yield group, held, scale, skip


def count_update(counts: Iterable[torch.Tensor], skip: torch.Tensor) -> None:
    """Add 1 to each count of updates, unless the update is withheld.

    Args:
        counts: fp32 scalars on the device of `skip`.
        skip: bool scalar.
    """
    held = list(counts)
    torch._foreach_add_(held, [skip.logical_not().float()] * len(held))  # one tensor for all would be read by the host


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, without its history; a plain tensor as it is."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
