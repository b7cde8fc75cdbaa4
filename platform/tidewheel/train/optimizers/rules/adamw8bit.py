"""torchao's AdamW with 8-bit moments, for any layout."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from tidewheel.errors import ConfigError

BLOCK = 256
"""Number of elements that share a scale, as in https://arxiv.org/abs/2110.02861."""


class AdamW8bit(TorchaoAdamW8bit):
    """`torchao.optim.AdamW8bit` whose state does not depend on the layout.

    torchao keeps tensors with few elements on a rank in fp32, and its blocks of elements that share a scale cross rows.
    Here a matrix is quantised if its rows are whole blocks, however it is sharded, so codes are the same on any number
    of ranks.
    """

    def prepare(self) -> None:
        """Allocate the state of all parameters at zero."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": self._new_buffer(parameter, True),
                                         "exp_avg_sq": self._new_buffer(parameter, False)}

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
        if p.dim() < 2 or p.shape[-1] % self.block_size:
            return torch.zeros_like(p)
        part = p.to_local() if isinstance(p, DTensor) else p
        if part.shape[-1] % self.block_size:
            raise ConfigError(f"a weight {list(p.shape)} is cut into columns of {part.shape[-1]}, no multiple of "
                              f"{self.block_size}", where="optimizer.kind adamw8bit",
                              fix="lower parallel.tensor, or use adamw")
        if part.numel() == 0:  # a rank without rows has nothing to quantise
            moment = torch.zeros_like(part)
        else:
            moment = OptimState8bit.zeros(part.shape, signed, self.block_size, part.device, dtype=part.dtype)
        if not isinstance(p, DTensor):
            return moment
        return DTensor.from_local(moment, p.device_mesh, p.placements, run_check=False, shape=p.shape,
                                  stride=p.stride()).to(p.device)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update the parameters that have a gradient; compiled on CUDA only, because compiling on CPU is too slow."""
        cuda = any(parameter.is_cuda for group in self.param_groups for parameter in group["params"])
        with contextlib.nullcontext() if cuda else torch.compiler.set_stance("force_eager"):
            super().step(closure)


def stored(name: str, moment: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the checkpoint's form of a moment [R, C]: codes uint8 [R, C] and scales fp32 [R, C / 256].

    They share the moment's memory, so loading into them restores it. A moment in fp32 is returned unchanged.
    """
    if moment.dim() < 2 or moment.shape[-1] % BLOCK:
        return {name: moment}
    part = moment.to_local() if isinstance(moment, DTensor) else moment
    if isinstance(part, OptimState8bit):
        codes, scales = part.codes, part.scale.view(*part.codes.shape[:-1], -1)
    else:  # no rows here
        codes, scales = part.to(torch.uint8), part.new_zeros(0, part.shape[-1] // BLOCK)
    whole = (*moment.shape[:-1], moment.shape[-1] // BLOCK)
    return {f"{name}.codes": _placed(moment, codes, moment.shape), f"{name}.scale": _placed(moment, scales, whole)}


def _placed(like: torch.Tensor, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return `part` as this rank's shard of a tensor of `shape`, sharded like `like`."""
    if not isinstance(like, DTensor):
        return part
    stride = tuple(math.prod(shape[dimension + 1:]) for dimension in range(len(shape)))
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape),
                              stride=stride)
