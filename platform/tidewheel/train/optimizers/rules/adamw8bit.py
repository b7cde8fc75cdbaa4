"""AdamW with its two moments in 8 bits, from torchao, for any layout."""

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
"""Elements that share a scale, as in https://arxiv.org/abs/2110.02861."""


class AdamW8bit(TorchaoAdamW8bit):
    """`torchao.optim.AdamW8bit` whose state does not depend on the layout.

    torchao keeps in fp32 what has too few elements on this rank, and lets a block of elements that share a scale run
    over the end of a row. Here a matrix is quantised when its rows are whole blocks, however it is cut: the same codes
    on any number of ranks.
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
                              mend="lower parallel.tensor, or use adamw")
        if part.numel() == 0:  # a rank without rows: nothing to quantise
            moment = torch.zeros_like(part)
        else:
            moment = OptimState8bit.zeros(part.shape, signed, self.block_size, part.device, dtype=part.dtype)
        if not isinstance(p, DTensor):
            return moment
        return DTensor.from_local(moment, p.device_mesh, p.placements, run_check=False, shape=p.shape,
                                  stride=p.stride()).to(p.device)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of the parameters that have a gradient; compiled on CUDA, too slow to compile on CPU."""
        cuda = any(parameter.is_cuda for group in self.param_groups for parameter in group["params"])
        with contextlib.nullcontext() if cuda else torch.compiler.set_stance("force_eager"):
            super().step(closure)


def stored(name: str, moment: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a moment [R, C]: codes [R, C] uint8 and scales [R, C / 256] fp32, or itself.

    They share its memory, so that loading into them sets it.
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
    """`part` as this rank's share of a tensor of `shape`, cut as `like` is."""
    if not isinstance(like, DTensor):
        return part
    stride = tuple(math.prod(shape[dimension + 1:]) for dimension in range(len(shape)))
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape),
                              stride=stride)
