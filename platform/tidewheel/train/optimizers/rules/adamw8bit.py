"""torchao's AdamW with 8-bit moments, for any layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor
from torchao.optim.subclass_8bit import OptimState8bit

from tidewheel.errors import ConfigError
from tidewheel.train.optimizers.rules import host_adamw8bit
from tidewheel.train.optimizers.rules.on_device import count_update, groups_to_update, kernel, local
from tidewheel.train.parallel.offloaded import with_part

BLOCK = 256
"""Number of elements that share a scale, as in https://arxiv.org/abs/2110.02861."""


class AdamW8bit(TorchaoAdamW8bit):
    """`torchao.optim.AdamW8bit` whose state does not depend on the layout.

    torchao keeps tensors with few elements on a rank in fp32, and its blocks of elements that share a scale cross rows.
    Here a matrix is quantised if its rows are whole blocks, however it is sharded, so codes are the same on any number
    of ranks.

    Args:
        params: parameters or parameter groups.
        fused: take the gradient's scale and whether to update on the device, see `on_device`.
        paged: keep the moments of matrices in host memory, pinned if the parameters are on CUDA. An update with `fused`
            copies those of one parameter to its device, and back. Elsewhere the host computes, with the moments there.
        settings: of `torchao.optim.AdamW8bit`.
    """

    def __init__(self, params: Any, *, fused: bool = False, paged: bool = False, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._step_supports_amp_scaling = fused
        self._paged = paged

    def prepare(self) -> None:
        """Allocate the state of all parameters at zero."""
        for group in self.param_groups:
            for parameter in group["params"]:
                device = parameter.device if self._step_supports_amp_scaling else torch.device("cpu")
                self.state[parameter] = {"step": torch.zeros((), device=device),
                                         "exp_avg": self._new_buffer(parameter, True),
                                         "exp_avg_sq": self._new_buffer(parameter, False)}

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
        part = p.to_local() if isinstance(p, DTensor) else p
        quantises = p.dim() > 1 and p.shape[-1] % self.block_size == 0
        if not quantises and not (self._paged and p.dim() > 1):
            return torch.zeros_like(p)
        if quantises and part.shape[-1] % self.block_size:
            raise ConfigError(f"a weight {list(p.shape)} is cut into columns of {part.shape[-1]}, no multiple of "
                              f"{self.block_size}", where="optimizer.kind adamw8bit",
                              fix="lower parallel.tensor, or use adamw")
        device = torch.device("cpu") if self._paged else part.device
        if quantises and part.numel():
            moment = OptimState8bit.zeros(part.shape, signed, self.block_size, device, dtype=part.dtype)
        else:  # a rank without rows has nothing to quantise
            moment = torch.zeros_like(part, device=device)
        if self._paged and part.is_cuda:
            moment = _converted(moment, torch.Tensor.pin_memory)
        return _placed(p, moment, p.shape)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update the parameters that have a gradient: on the device, or on the host if they are there."""
        if self._step_supports_amp_scaling:
            assert closure is None
            self._step_on_device()
            return
        kinds = {parameter.device.type for group in self.param_groups for parameter in group["params"]}
        if kinds - {"cpu"}:
            with contextlib.nullcontext() if "cuda" in kinds else torch.compiler.set_stance("force_eager"):
                super().step(closure)
            return
        assert closure is None
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        host_adamw8bit.update(local(parameter), local(parameter.grad), state, group,
                                              local(state["exp_avg"]), local(state["exp_avg_sq"]))

    @torch.no_grad()
    def _step_on_device(self) -> None:
        for group, held, scale, skip in groups_to_update(self):
            count_update([self.state[parameter]["step"] for parameter in held], skip)
            settings = (group["lr"], *group["betas"], group["weight_decay"], group["eps"], scale, skip)
            for parameter in held:
                weight, gradient, state = local(parameter), local(parameter.grad), self.state[parameter]
                kept = [local(state["exp_avg"]), local(state["exp_avg_sq"])]
                pages = self._paged and weight.dim() > 1
                first, second = [_on(moment, weight.device) for moment in kept] if pages else kept
                if isinstance(first, OptimState8bit) and isinstance(second, OptimState8bit):
                    _update_quantised(weight, gradient, state["step"], first.codes, first.scale, first.qmap,
                                      second.codes, second.scale, second.qmap, *settings)
                else:
                    _update(weight, gradient, state["step"], first, second, *settings)
                if pages:
                    for moment, changed in zip(kept, (first, second)):
                        _copy(changed, moment)
            if self._paged and local(held[0]).is_cuda:
                torch.cuda.current_stream().synchronize()  # the host reads the moments to save them


def _converted(moment: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a moment whose tensors are converted: the moment itself, or its codes, scales and values of codes."""
    if not isinstance(moment, OptimState8bit):
        return convert(moment)
    return OptimState8bit(convert(moment.codes), convert(moment.scale), convert(moment.qmap), moment.signed,
                          dtype=moment.dtype)


def _on(moment: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a moment on a device."""
    return _converted(moment, lambda part: part.to(device, non_blocking=True, copy=True))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a moment to another in place."""
    if isinstance(source, OptimState8bit) and isinstance(target, OptimState8bit):
        target.codes.copy_(source.codes, non_blocking=True)
        target.scale.copy_(source.scale, non_blocking=True)
    else:
        target.copy_(source, non_blocking=True)


@kernel(dynamic=False)
def _update_quantised(weight: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor, codes1: torch.Tensor,
                      scale1: torch.Tensor, qmap1: torch.Tensor, codes2: torch.Tensor, scale2: torch.Tensor,
                      qmap2: torch.Tensor, rate: torch.Tensor, beta1: float, beta2: float, decay: float, epsilon: float,
                      scale: torch.Tensor, skip: torch.Tensor) -> None:
    """Update one parameter whose moments are codes and scales; see `_adamw` for the rest."""
    first, second = dequant_with_qmap(codes1, qmap1, scale1), dequant_with_qmap(codes2, qmap2, scale2)
    updated, first, second = _adamw(weight, gradient / scale, step, first, second, rate, beta1, beta2, decay, epsilon)
    weight.copy_(torch.where(skip, weight, updated))
    for moment, codes, scales, qmap in ((first, codes1, scale1, qmap1), (second, codes2, scale2, qmap2)):
        normalised, new_scales = scale_tensor(moment, BLOCK)
        codes.copy_(torch.where(skip, codes, quantize_8bit_with_qmap(normalised, qmap)))
        scales.copy_(torch.where(skip, scales, new_scales))


@kernel(dynamic=False)
def _update(weight: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor, first: torch.Tensor,
            second: torch.Tensor, rate: torch.Tensor, beta1: float, beta2: float, decay: float, epsilon: float,
            scale: torch.Tensor, skip: torch.Tensor) -> None:
    """Update one parameter with moments in fp32; see `_adamw` for the rest."""
    updated, new_first, new_second = _adamw(weight, gradient / scale, step, first, second, rate, beta1, beta2, decay,
                                            epsilon)
    weight.copy_(torch.where(skip, weight, updated))
    first.copy_(torch.where(skip, first, new_first))
    second.copy_(torch.where(skip, second, new_second))


def _adamw(weight: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor, first: torch.Tensor,
           second: torch.Tensor, rate: torch.Tensor, beta1: float, beta2: float, decay: float, epsilon: float,
           ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weight and the two moments after an update, as torchao's `single_param_adam` computes them.

    Args:
        weight: of one parameter.
        gradient: its gradient.
        step: number of the update, from 1; it may be 0 if the update is withheld.
        first: moment.
        second: moment.
        rate: learning rate, a scalar.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        decay: weight decay.
        epsilon: added to the root of the second moment.
    """
    first, second = first.lerp(gradient, 1 - beta1), second.lerp(gradient.square(), 1 - beta2)
    root = second.sqrt() / (1 - beta2**step).sqrt() + epsilon
    return weight - rate * decay * weight - rate * (first / (1 - beta1**step)) / root, first, second


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
    return with_part(like, part, shape) if isinstance(like, DTensor) else part
