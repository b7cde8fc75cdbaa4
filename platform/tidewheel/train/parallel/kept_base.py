"""The frozen base of an adapter between the generations of one process.

A generation that follows another with the same shards takes the base from memory. Otherwise it reads all of it from
storage again, though only the adapter has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from tidewheel.models.adapter import MARK
from tidewheel.train.parallel.initial_parts import own_indices

if TYPE_CHECKING:
    from tidewheel.train.parallel.model import ParallelModel
    from tidewheel.train.runtime import Loaded

ROOM = 0.4
"""Largest share of a GPU's memory that the kept base may take: the next model is built beside it."""


class KeptBase:
    """This rank's part of the base that the last generation of this process had."""

    def __init__(self) -> None:
        self._base: Loaded | None = None
        self._parts: dict[str, tuple[Any, torch.Tensor]] = {}

    def fits(self, model: ParallelModel) -> bool:
        """Return whether it is all that a model needs on this rank."""
        if self._base is None:
            return False
        needed = {name: _place(tensor) for name, tensor in _tensors(model)}
        return needed == {name: place for name, (place, _) in self._parts.items()}

    @torch.no_grad()
    def fill(self, model: ParallelModel) -> Loaded:
        """Set the frozen base of a model that it `fits`; return which checkpoint it is of."""
        assert self._base is not None
        for name, tensor in _tensors(model):
            _local(tensor).copy_(self._parts[name][1])
        model.refresh()
        return self._base

    def keep(self, model: ParallelModel, base: Loaded) -> None:
        """Keep the base of a model after the model, unless a GPU has no room for that.

        Args:
            model: with its values.
            base: the checkpoint that they are of.
        """
        self._base, self._parts = None, {}
        parts = {name: (_place(tensor), _local(tensor)) for name, tensor in _tensors(model)}
        if model.device.type == "cuda":
            size = sum(part.nbytes for _, part in parts.values())
            if size > ROOM * torch.cuda.get_device_properties(model.device).total_memory:
                return
        buffers = dict(model.named_buffers())  # they move while the adapter is trained
        self._base = base
        self._parts = {name: (place, part.clone() if name in buffers else part)
                       for name, (place, part) in parts.items()}


def _tensors(model: ParallelModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor or DTensor) of a model's frozen base."""
    for name, parameter in model.frozen_parameters():
        if MARK not in name:
            yield name, parameter.detach()
    yield from model.named_buffers()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(tensor: torch.Tensor) -> Any:
    """Return what describes this rank's part of a tensor: where it lies in the whole one, and how it is kept."""
    digest = ""
    if isinstance(tensor, DTensor):
        parts = hashlib.sha256()
        for dim in range(tensor.ndim):
            parts.update(own_indices(tensor, dim).numpy().tobytes())
        digest = parts.hexdigest()
    return tuple(tensor.shape), digest, _local(tensor).shape, tensor.dtype, tensor.device
