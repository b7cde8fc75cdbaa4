"""AdamW with 8-bit moments on a CPU: torchao's update, bit for bit, without compiling it and a few times as fast.

torchao finds the code of a value by eight lookups and rounds it by two more, which is quick where a compiler fuses
them. Here the lookups are over the values at which the rounded code changes, with 32-bit indices and in pieces that
stay in the CPU's cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torchao.optim.quant_utils import scale_tensor
from torchao.optim.subclass_8bit import OptimState8bit

PIECE = 1 << 17
"""Elements that are updated at once, a multiple of a block."""


def update(weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any],
           first: torch.Tensor, second: torch.Tensor) -> None:
    """Update one parameter on a CPU, as torchao's `single_param_adam` does, and count the update.

    Args:
        weight: this rank's part; the update is computed in fp32.
        gradient: of the same shape.
        state: of the parameter; "step" counts its updates.
        group: its settings.
        first: moment, fp32 or `OptimState8bit`.
        second: moment, like the first.
    """
    state["step"] += 1
    beta1, beta2 = group["betas"]
    corrections = 1 - beta1**state["step"], 1 - beta2**state["step"]
    flat = weight if weight.is_contiguous() else weight.contiguous()
    parts = [tensor.reshape(-1).split(PIECE) for tensor in (flat, gradient)]
    for index, (target, slopes) in enumerate(zip(*parts)):
        moments = [_Piece(moment, index) for moment in (first, second)]
        values, slope = target.float(), slopes.float()
        decayed = values - group["lr"] * group["weight_decay"] * values
        mean = moments[0].value().lerp(slope, 1 - beta1)
        square = moments[1].value().lerp(slope.square(), 1 - beta2)
        moments[0].store(mean)
        moments[1].store(square)
        root = (square.sqrt() / corrections[1].sqrt()) + group["eps"]
        target.copy_(decayed - group["lr"] * (mean / corrections[0]) / root)
    if flat is not weight:
        weight.copy_(flat)


class _Piece:
    """A piece of a moment.

    Args:
        moment: fp32 or `OptimState8bit`.
        index: of the piece of `PIECE` elements.
    """

    def __init__(self, moment: torch.Tensor, index: int) -> None:
        self._values: torch.Tensor | None = None
        start = index * PIECE
        if not isinstance(moment, OptimState8bit):
            self._values = moment.view(-1)[start:start + PIECE]
            return
        block = moment.block_size
        self._block, self._map = block, moment.qmap
        self._codes = moment.codes.view(-1)[start:start + PIECE]
        self._scale = moment.scale[start // block:(start + PIECE) // block]
        self._bounds = bounds(moment.signed)

    def value(self) -> torch.Tensor:
        """Return it in fp32."""
        if self._values is not None:
            return self._values.float()
        looked_up = self._map.index_select(0, self._codes.int())
        return (looked_up.view(-1, self._block) * self._scale.view(-1, 1)).view(-1)

    def store(self, value: torch.Tensor) -> None:
        """Set it to fp32 values."""
        if self._values is not None:
            self._values.copy_(value)
            return
        scaled, scale = scale_tensor(value, self._block)
        self._codes.copy_(codes_of(scaled, self._bounds))
        self._scale.copy_(scale)


def codes_of(values: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Return the number of limits that each value reaches, by binary search without branches, int32 [n].

    Args:
        values: fp32 [n].
        limits: ascending, fp32 [255].
    """
    codes = torch.zeros(values.shape, dtype=torch.int32)
    for step in (128, 64, 32, 16, 8, 4, 2, 1):
        codes.add_((values >= limits.index_select(0, codes + (step - 1))).int(), alpha=step)
    return codes


@cache
def bounds(signed: bool) -> torch.Tensor:
    """Return the smallest fp32 value of each code but the first, as torchao rounds, [255].

    A value x between the values a and b of two codes gets the upper one if fl(x - a) >= fl((b - a) / 2).

    Args:
        signed: of the moment.
    """
    table = OptimState8bit.zeros((256,), signed, 256).qmap
    low, high = table[:-1], table[1:]
    half = (high - low) * 0.5
    value = low + half
    for _ in range(64):  # the difference is monotone in x: step to the smallest x that is rounded up
        below = torch.nextafter(value, torch.tensor(-torch.inf))
        value = torch.where(below - low >= half, below, value)
    for _ in range(64):
        value = torch.where(value - low >= half, value, torch.nextafter(value, torch.tensor(torch.inf)))
    return value
