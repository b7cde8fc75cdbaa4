"""Adam and AdamW of offloaded parameters: torch's vectorised CPU kernels, with the same bits for every sharding.

The fused kernels read each element once, so they move 28 bytes of a fp32 parameter where the operations of the foreach
variant move 84. But they round the elements after the last whole vector of a tensor differently from the others, and
which elements those are follows from the sharding. So a tensor that does not fill whole vectors is updated in a copy
that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tidewheel.train.optimizers.rules.on_device import local

LANES = 16
"""Elements of fp32 in the widest vector of a CPU, and in a cache line, by which kernels share work among threads."""


def is_offloaded(groups: Iterable[dict[str, Any]]) -> bool:
    """Return whether parameters are in host memory while a GPU computes with them."""
    return any(isinstance(parameter, DTensor) and not parameter.is_cuda and parameter.device_mesh.device_type == "cuda"
               for group in groups for parameter in group["params"])


class HostAdam(torch.optim.Adam):
    """`torch.optim.Adam` of fp32 parameters in host memory."""

    KERNEL: Callable[..., None] = staticmethod(torch._fused_adam_)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            counts = [self.state[parameter]["step"] for parameter in held]
            if not held:
                continue
            torch._foreach_add_(counts, 1.0)
            columns: list[list[torch.Tensor]] = [[], [], [], []]
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            for parameter in held:
                state = self.state[parameter]
                tensors = [local(parameter), local(parameter.grad), local(state["exp_avg"]), local(state["exp_avg_sq"])]
                for column, tensor in zip(columns, tensors):
                    whole = _whole_vectors(tensor)
                    column.append(whole)
                    if whole is not tensor:
                        copies.append((tensor, whole))
            type(self).KERNEL(*columns, [], counts, lr=float(group["lr"]), beta1=group["betas"][0],
                              beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
                              amsgrad=False, maximize=False)
            for tensor, whole in copies:
                tensor.copy_(whole[:tensor.numel()].view_as(tensor))


class HostAdamW(HostAdam, torch.optim.AdamW):
    """`torch.optim.AdamW` of fp32 parameters in host memory."""

    KERNEL = staticmethod(torch._fused_adamw_)


def _whole_vectors(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor if it fills whole vectors, else a flat copy that does; the elements after it are zero."""
    if tensor.is_contiguous() and tensor.numel() % LANES == 0:
        return tensor
    return F.pad(tensor.reshape(-1), (0, -tensor.numel() % LANES))
