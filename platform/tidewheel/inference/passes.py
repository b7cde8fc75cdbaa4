"""Count the passes of a model, whoever computes them: its modules, or `inference.decoding`. Does not import torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_COUNTER = "_counts_passes"


class Beat(NamedTuple):
    """What a generator says of its work."""

    passes: int
    """Passes of its model, begun since it started."""
    computes: bool
    """Whether the last one goes on."""


class PassCounter:
    """Counts the passes of a model.

    Args:
        model: the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.beat = Beat(0, False)
        """Replaced as a whole: other threads may read it."""
        model.register_forward_pre_hook(self.begins)
        model.register_forward_hook(self.ends, always_call=True)
        vars(model)[_COUNTER] = self

    def begins(self, *_: Any) -> None:
        """Count a pass."""
        self.beat = Beat(self.beat.passes + 1, True)

    def ends(self, *_: Any) -> None:
        """Note that it is over."""
        self.beat = Beat(self.beat.passes, False)


@contextlib.contextmanager
def counted(model: torch.nn.Module) -> Iterator[None]:
    """Count what the block computes as a pass of a model that has a `PassCounter`."""
    counter: PassCounter | None = vars(model).get(_COUNTER)
    if counter is None:
        yield
        return
    counter.begins()
    try:
        yield
    finally:
        counter.ends()
