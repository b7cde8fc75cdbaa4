"""Frozen linear layers in 4-bit NormalFloat with 8-bit scales (QLoRA, https://arxiv.org/abs/2305.14314, section 3).

A block of 64 neighbouring entries of a row has a scale, its largest magnitude. The codes of the entries are those of
bitsandbytes. The scales of a row are kept in 8 bits, linear about their mean, with an fp32 step and mean for the row:
4 + 8/64 + 64/inputs bits a parameter, 4.14 for 4,096 inputs. Nothing spans two rows, so FSDP2 shards all by rows.
Tensor parallelism cuts rows between blocks, and the ranks exchange scales, so all values are those of one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from tidewheel.errors import ConfigError
from tidewheel.models.adapting.counts import BLOCK as BLOCK
from tidewheel.models.adapting.shards import cut_of, own
from tidewheel.models.decoder import Decoder

VALUES = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
          -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
          0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
"""Value of each code, from appendix E of the paper."""
_LEVELS = 127
"""Largest magnitude of an 8-bit scale."""


def encode(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes, uint8 [O, I / 2], and the scales, fp32 [O, I / 64].

    A byte has two codes, the first in its high half.

    Args:
        weight_OI: with I a multiple of 64.
    """
    blocks = weight_OI.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=2)
    table = torch.tensor(VALUES, device=weight_OI.device)
    middles = (table[1:] + table[:-1]) / 2
    shares = blocks / torch.where(scales > 0, scales, 1.0)[:, :, None]
    codes = torch.bucketize(shares, middles).to(torch.uint8).flatten(1)
    return codes[:, ::2] << 4 | codes[:, 1::2], scales


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the matrix [O, I] of `encode`, in fp32.

    Args:
        codes: uint8 [O, I / 2].
        scales: fp32 [O, I / 64].
    """
    table = torch.tensor(VALUES, device=codes.device)
    pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1)  # both values of each byte
    values = F.embedding(codes.int(), pairs).flatten(1).unflatten(1, (-1, BLOCK))
    return (values * scales[:, :, None]).flatten(1)


def encode_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales as int8 [O, S], and fp32 [O, 2]: the mean of each row, and the value of a step.

    Args:
        scales: fp32 [O, S].
    """
    mean = scales.mean(dim=1, keepdim=True)
    step = (scales - mean).abs().amax(dim=1, keepdim=True) / _LEVELS
    steps = ((scales - mean) / torch.where(step > 0, step, 1.0)).round().to(torch.int8)
    return steps, torch.cat((mean, step), dim=1)


def decode_scales(steps: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the scales fp32 [O, S] of `encode_scales`."""
    return rows[:, :1] + steps.float() * rows[:, 1:]


def rounded(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return a matrix as it is computed with after quantisation, in fp32."""
    codes, scales = encode(weight_OI)
    return decode(codes, decode_scales(*encode_scales(scales)))


class Nf4Linear(nn.Linear):
    """A linear layer whose frozen matrix is kept in NF4. A frozen `nn.Linear` becomes one by `quantize`."""

    codes: nn.Parameter
    steps: nn.Parameter
    rows: nn.Parameter
    mesh: DeviceMesh | None = None
    """The ranks of tensor parallelism that share the matrix."""
    cut: int | None = None
    """Dimension of [O, I] that they cut."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Return the matrix [O, I] in fp32, a DTensor under tensor parallelism."""
        codes, steps, rows = self._parts()
        part = decode(codes, decode_scales(steps, rows))
        if self.mesh is None or self.cut is None:
            return part
        return DTensor.from_local(part, self.mesh, [Shard(self.cut)], run_check=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(own(x))
        if isinstance(x, DTensor):
            placement: Placement = Shard(y.ndim - 1) if x.placements[0].is_replicate() else Partial()
            y = DTensor.from_local(y, x.device_mesh, [placement], run_check=False)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product, without the bias."""
        y: torch.Tensor = _Product.apply(x, *self._parts())
        return y

    def _parts(self) -> list[torch.Tensor]:
        return [part.to_local() if isinstance(part, DTensor) else part for part in (self.codes, self.steps, self.rows)]

    @torch.no_grad()
    def fill(self, weight: torch.Tensor) -> None:
        """Quantise some rows. The ranks that share their columns call this together.

        Args:
            weight: what this rank holds of `codes`, on any device.
        """
        codes, scales = encode(weight)
        if self.mesh is None or self.cut != 1:
            steps, rows = encode_scales(scales)
        else:  # the scales of a row are encoded together
            scales = scales.to(self.codes.device)
            parts = [torch.empty_like(scales) for _ in range(self.mesh.size())]
            dist.all_gather(parts, scales, group=self.mesh.get_group())
            steps, rows = encode_scales(torch.cat(parts, dim=1))
            steps = steps.chunk(len(parts), dim=1)[self.mesh.get_local_rank()]
        for parameter, value in ((self.codes, codes), (self.steps, steps), (self.rows, rows)):
            part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            part.copy_(value)


class _Product(torch.autograd.Function):
    """x W' of a quantised W. The backward pass computes W again rather than keep it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, steps: torch.Tensor,
                rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(codes, steps, rows)
        ctx.dtype = x.dtype
        return F.linear(x, decode(codes, decode_scales(steps, rows)).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (grad,) = grad_outputs
        codes, steps, rows = ctx.saved_tensors
        return (grad @ decode(codes, decode_scales(steps, rows)).to(grad.dtype)).to(ctx.dtype), None, None, None


def quantizes(name: str) -> bool:
    """Return whether `quantize` replaces a matrix [O, I], given the name of the parameter in the whole model."""
    return name.startswith("blocks.") and name.endswith(".weight") and not name.endswith(".router.weight")


def quantize(model: Decoder) -> None:
    """Let the linear layers of a frozen decoder's blocks keep their matrices in NF4, with uninitialised values.

    Raises:
        ConfigError: the width of a layer's input on a rank is no multiple of 64, or the layer computes in fp8.
    """
    for index, block in model.layers():
        for name, layer in block.named_modules():
            if not isinstance(layer, nn.Linear) or isinstance(layer, Nf4Linear):
                continue
            if type(layer) is not nn.Linear:
                raise ConfigError(f"blocks.{index}.{name} is a {type(layer).__name__} with products of its own",
                                  where="adapter.base", fix="set a precision other than fp8, or adapter.base: plain")
            inputs = own(layer.weight.detach()).shape[1]
            if inputs % BLOCK:
                raise ConfigError(f"blocks.{index}.{name} has {inputs} inputs on a rank, which is no multiple of "
                                  f"{BLOCK}", where="adapter.base", fix="lower parallel.tensor, or set adapter.base: "
                                  "plain")
            _quantize(layer)


def _quantize(layer: nn.Linear) -> None:
    weight: torch.Tensor = layer.weight
    outputs, inputs = weight.shape
    del layer.weight
    layer.__class__ = Nf4Linear
    assert isinstance(layer, Nf4Linear)
    if isinstance(weight, DTensor):
        layer.mesh = weight.device_mesh
        layer.cut = cut_of(weight)
    for name, columns, dtype in (("codes", inputs // 2, torch.uint8), ("steps", inputs // BLOCK, torch.int8),
                                 ("rows", 2, torch.float32)):
        empty = torch.empty(outputs, columns, dtype=dtype, device=weight.device)
        if isinstance(weight, DTensor):
            placement = Replicate() if name == "rows" and layer.cut == 1 else weight.placements[0]
            empty = distribute_tensor(empty, weight.device_mesh, [placement], src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(empty, requires_grad=False))
