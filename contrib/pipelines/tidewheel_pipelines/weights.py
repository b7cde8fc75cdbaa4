"""The weights of a pipeline's stage in several versions: micro-batches on their way keep the one they began with."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class _Place:
    """Where a module holds a parameter."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


class Versions:
    """The weights of one stage after each update that is still needed. Version n has had n updates.

    The newest version shares the memory of the stage's own parameters, which the optimizer updates. Before an update,
    the parameters move to new memory if that version is still needed, so that nothing is kept that nobody needs.

    Args:
        part: the stage.

    Attributes:
        newest: number of the newest version.
        most_bytes: most bytes of weights that were held at once, the newest version included.
    """

    def __init__(self, part: nn.Module) -> None:
        self._places = [_Place(module, name, parameter) for module in part.modules()
                        for name, parameter in module.named_parameters(recurse=False)]
        self.newest = 0
        self._held: dict[int, list[nn.Parameter]] = {}
        self._uses: Counter[int] = Counter()
        self.most_bytes = 0
        self._share()

    def _share(self) -> None:
        """Let the newest version have the memory of the stage's parameters."""
        self._held[self.newest] = [nn.Parameter(place.parameter.data, requires_grad=place.parameter.requires_grad)
                                   for place in self._places]
        distinct = {parameter.data_ptr(): parameter.nbytes for held in self._held.values() for parameter in held}
        self.most_bytes = max(self.most_bytes, sum(distinct.values()))

    def refresh(self) -> None:
        """Take the stage's parameters as they are now for the newest version, when no version is taken."""
        assert not any(self._uses.values())
        self._held.clear()
        self._share()

    def take(self, version: int) -> None:
        """Keep a version until it is given back."""
        assert version in self._held, f"version {version} is gone, there are {sorted(self._held)}"
        self._uses[version] += 1

    def give_back(self, version: int) -> None:
        """Give back a version that was taken."""
        self._uses[version] -= 1
        self._free()

    def _free(self) -> None:
        for version in [held for held in self._held if held != self.newest and not self._uses[held]]:
            del self._held[version]

    @contextlib.contextmanager
    def of(self, version: int) -> Iterator[None]:
        """Let the stage compute with a version during the block."""
        held = self._held[version]
        for place, parameter in zip(self._places, held):
            setattr(place.module, place.name, parameter)
        try:
            yield
        finally:
            for place in self._places:
                setattr(place.module, place.name, place.parameter)

    def add_gradients(self, version: int) -> None:
        """Add the gradients of a version to those of the stage's parameters."""
        for place, parameter in zip(self._places, self._held[version]):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if place.parameter.grad is None:
                place.parameter.grad = gradient
            else:
                place.parameter.grad.add_(gradient)

    def before_update(self) -> None:
        """Move the stage's parameters to new memory, if the newest version is needed as it is."""
        if self._uses[self.newest]:
            for place in self._places:
                place.parameter.data = place.parameter.data.clone()

    def after_update(self) -> None:
        """Make the updated parameters the newest version."""
        self.newest += 1
        self._share()
        self._free()
