"""Inputs of blocks that wait for their backward pass elsewhere than on the device.

`BlockInputs` puts the input of each block into a store during the forward pass and takes it back for the block's
recomputation. `input_stores` has the stores: pinned host memory, and a file on a local disk.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks


class Kept:
    """An input that a store has. The store uses its space again as soon as the graph lets go of this.

    Args:
        x: the input.
        index: of its block.
        previous: the input of the block before in the same forward pass; None: there is none.
    """

    def __init__(self, x: torch.Tensor, index: int, previous: Kept | None) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.bytes = x.numel() * x.element_size()
        self.index = index
        self._previous = None if previous is None else weakref.ref(previous)

    @property
    def previous(self) -> Kept | None:
        """The input that the backward pass needs next; None: none, or it is gone."""
        return None if self._previous is None else self._previous()


class Store(Protocol):
    """A place for inputs outside the device."""

    ahead: int
    """How many inputs to fetch before they are needed."""

    def put(self, kept: Kept, x: torch.Tensor) -> None:
        """Begin to copy an input there."""

    def fetch(self, kept: Kept) -> None:
        """Begin to copy an input back."""

    def take(self, kept: Kept) -> torch.Tensor:
        """Return an input on its device. The graph may need it again: it stays in the store."""


class BlockInputs:
    """Moves the inputs of one decoder's blocks away and back.

    Args:
        store: where they go.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: weakref.ref[Kept] | None = None

    def of_block(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        """Return a block's forward pass, which keeps its input in the store.

        Args:
            forward: the block's forward pass, which checkpoints its activations; it may be compiled.
            index: of the block.
        """
        return partial(self._forward, forward, index)

    def _forward(self, forward: Callable[..., Any], index: int, x: torch.Tensor, *shared: Any) -> Any:
        """All blocks share the rope table and the mask, so only x is moved. No hook is called for what the block's
        inside saves: eager checkpointing has hooks of its own, and compiled code saves its arguments."""
        if not torch.is_grad_enabled() or not x.numel():
            return forward(x, *shared)
        address = x.data_ptr()

        def pack(tensor: torch.Tensor) -> torch.Tensor | Kept:
            if tensor.data_ptr() != address or tensor.shape != x.shape or tensor.dtype != x.dtype:
                return tensor
            return self._put(tensor, index)

        with saved_tensors_hooks(pack, self._take):
            return forward(x, *shared)

    @torch.no_grad()
    def _put(self, x: torch.Tensor, index: int) -> Kept:
        last = None if self._last is None else self._last()
        # a pipeline's next micro-batch begins with the first block again
        kept = Kept(x, index, last if last is not None and last.index < index else None)
        self._store.put(kept, x.detach())
        self._last = weakref.ref(kept)
        return kept

    @torch.no_grad()
    def _take(self, packed: torch.Tensor | Kept) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        x = self._store.take(packed)
        following = packed.previous
        for _ in range(self._store.ahead):
            if following is None:
                break
            self._store.fetch(following)
            following = following.previous
        return x
