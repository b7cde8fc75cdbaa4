"""Number types of a step: matrix products in at most fp32, all long sums in fp32.

Weights, moments, norms, softmax, loss and reductions over ranks are always fp32; `autocast` lowers the precision of
matrix products. fp16 has a small range of exponents, so its gradients are scaled (`LossScale`). fp8 quantises the
operands of the blocks' matrix products just before them (torchao), and everything else is bf16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tidewheel.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16", "fp8"]

REDUCED = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of `parallel.reduce_dtype`."""
AUTOCAST = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


def native_fp8(device: torch.device) -> bool:
    """Return whether a device has fp8 matrix products: NVIDIA compute capability 8.9 (Ada, Hopper) or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def precision_context(device: torch.device, precision: Precision) -> AbstractContextManager[None]:
    """Return the context of each forward pass; it may be entered many times."""
    if precision == "fp32":
        return torch.autocast(device.type, torch.bfloat16, enabled=False)
    return torch.autocast(device.type, AUTOCAST[precision])


@contextlib.contextmanager
def fp32_products(device: torch.device, tf32: bool) -> Iterator[None]:
    """Compute fp32 matrix products of a CUDA device in TF32, or in full fp32, inside the block.

    TF32 rounds the operands to 10 bits of mantissa and adds in fp32
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).

    Args:
        device: device of the model.
        tf32: whether to use TF32.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_precision(device: torch.device, precision: Precision, *, emulated: bool = False) -> None:
    """Raise ConfigError when `device` cannot compute in `precision`.

    Args:
        device: device of the model.
        precision: number type of the matrix products.
        emulated: fp8 products are emulated, see `Fp8Config.emulate`.
    """
    if precision != "fp8" or emulated or native_fp8(device):
        return
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type.upper()}"
    raise ConfigError(f"fp8 needs a GPU with fp8 matrix products (NVIDIA Ada, Hopper or later), this is {what}",
                      where="precision", fix="set precision: bf16")


def sharded_precision(precision: Precision, device: torch.device,
                      reduce_dtype: torch.dtype = torch.float32) -> MixedPrecisionPolicy:
    """Return how FSDP2 gathers weights and reduces their gradients.

    On CUDA, weights are gathered in the type of the matrix products: half the bytes of fp32. That also rounds the
    embedding and the norms' weights, the only differences from autocast alone. The residual stream stays fp32.

    Args:
        precision: number type of the matrix products.
        device: device of the model.
        reduce_dtype: of the sum of gradients over ranks.
    """
    low = AUTOCAST.get(precision) if device.type == "cuda" else None
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce_dtype, cast_forward_inputs=False)


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (section 3.2 of https://arxiv.org/abs/1710.03740; the numbers are torch's
    GradScaler's): gradients are of loss x scale, so that small ones do not vanish. An update whose gradients overflow
    is left out and the scale halved; after `growth_interval` good updates in a row it is doubled.

    It is host arithmetic on figures that all ranks share, so all ranks agree; `state` belongs to the checkpoint.
    """

    scale: float = 2.0**16
    """Scale of the gradient of the mean loss."""
    good: int = 0
    """Updates since the scale last changed."""
    growth_interval: int = 2000

    def of_sums(self, tokens: int) -> float:
        """Return the scale for a SUM of about `tokens` token losses: a power of two, so that it divides out exactly."""
        return self.scale / 2.0 ** max(0, tokens - 1).bit_length()

    def update(self, finite: bool) -> None:
        """Adjust the scale after an update, given whether its gradients were finite."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 2.0**-14)
        elif self.good == self.growth_interval:
            self.scale, self.good = self.scale * 2, 0

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint."""
        return {"scale": self.scale, "good": self.good}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.scale, self.good = float(state["scale"]), int(state["good"])
