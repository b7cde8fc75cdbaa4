"""Values of an adapter's run: the frozen base, and the initial values of the adapter, which may depend on the base."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tidewheel.models.adapter import MARK
from tidewheel.models.adapting.attach import adapted
from tidewheel.models.adapting.experts import StackedLinear
from tidewheel.models.adapting.nf4 import Nf4Linear, decode, decode_scales
from tidewheel.models.initial_values import normal_rows
from tidewheel.train.parallel.initial_parts import Draw, fill, own_indices
from tidewheel.train.parallel.model import ParallelModel
from tidewheel.train.parallel.offloaded import whole, with_part

Fill = Callable[[Mapping[str, torch.Tensor]], None]
"""Sets tensors by their names in the whole model, on all ranks together."""


@torch.no_grad()
def set_base(model: ParallelModel, fill_all: Fill) -> None:
    """Set the frozen base, and quantise what is kept in fewer bits. All ranks call it together.

    Args:
        model: with an adapter.
        fill_all: sets the tensors that it is given, which are plain or sharded.
    """
    quantized = dict(_quantized(model))
    values: dict[str, torch.Tensor] = {}
    for name, parameter in model.frozen_parameters():
        module, _, kind = name.rpartition(".")
        if MARK not in name and (module not in quantized or kind == "bias"):
            values[name] = parameter.detach()
    values |= model.named_buffers()  # of the base; those that move during training are saved with the adapter
    wide = {f"{name}.weight": _wide(layer, values) for name, layer in quantized.items()}
    fill_all({**values, **wide})
    for name, layer in quantized.items():
        value = wide.pop(f"{name}.weight")
        layer.fill(value.to_local() if isinstance(value, DTensor) else value)
    model.refresh()


def init_base(model: ParallelModel, draw: Draw) -> None:
    """Set the frozen base to the initial values of a new model.

    Args:
        model: with an adapter.
        draw: returns rows of the initial value of a parameter of the base.
    """
    def fill_all(values: Mapping[str, torch.Tensor]) -> None:
        buffers = dict(model.named_buffers())
        for name, value in values.items():
            if name in buffers:
                value.zero_()
            else:
                fill(name, value, draw)

    set_base(model, fill_all)


@torch.no_grad()
def init_adapter(model: ParallelModel, seed: int) -> None:
    """Set the initial values of the adapter, once the base has its values. All ranks call it together."""
    adapter = model.adapter
    assert adapter is not None

    def draw(name: str, shape: torch.Size, rows: range) -> torch.Tensor:
        mean, std = adapter.distribution(name, tuple(shape))
        if std == 0:
            return torch.full((len(rows), *shape[1:]), mean)
        return mean + normal_rows(name, shape, seed, rows, std)

    trained = {name: parameter for name, parameter in model.named_parameters() if MARK in name}
    for name, parameter in (*trained.items(), *model.constants().items()):
        fill(name, parameter, draw)
    for part in model.parts:
        for _, layer, added in adapted(part):
            start = getattr(added, "start", None)
            if start is None or not isinstance(layer, nn.Linear | nn.Embedding | StackedLinear):
                continue
            for key, value in start(whole_weight(layer)).items():
                _set_part(getattr(added, key), value)
    model.refresh()


def whole_weight(layer: nn.Linear | nn.Embedding | StackedLinear) -> torch.Tensor:
    """Return the whole matrix of a layer, gathered. All ranks that share it call this together."""
    if not isinstance(layer, Nf4Linear):
        return whole(layer.weight.detach())
    codes, steps, rows = (whole(part.detach()) for part in (layer.codes, layer.steps, layer.rows))
    return decode(codes, decode_scales(steps, rows))


def _set_part(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Set this rank's part of a parameter, given the whole value."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    for dim in range(parameter.ndim):
        value = value.index_select(dim, own_indices(parameter, dim).to(value.device))
    parameter.to_local().copy_(value)


def _quantized(model: ParallelModel) -> Iterator[tuple[str, Nf4Linear]]:
    for part in model.parts:
        for name, module in part.named_modules():
            if isinstance(module, Nf4Linear):
                yield name, module


def _wide(layer: Nf4Linear, others: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return an uninitialised matrix in host memory, sharded like a layer's codes, in the dtype of other parameters."""
    dtype = next(iter(others.values())).dtype if others else torch.float32
    shape = (layer.out_features, layer.in_features)
    codes = layer.codes.detach()
    if not isinstance(codes, DTensor):
        return torch.empty(shape, dtype=dtype)
    rows, columns = codes.to_local().shape
    part = torch.empty(rows, 2 * columns, dtype=dtype)  # a byte has two codes
    return with_part(codes, part, shape)
