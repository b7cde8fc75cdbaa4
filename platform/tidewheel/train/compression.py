"""The base of gradient compression: a part that sums a gradient over workers and sends less than the gradient.

    class Signs(tw.Compression):
        "Send the sign of each element, and one size for all of them."

        def sum(self, values, at):
            sizes = values.abs().mean(dim=1, keepdim=True)
            signs = values.sign()
            values -= signs * sizes                         # what stays behind: the error, for the next step
            signs, sizes = yield tw.Gather(signs.char(), sizes)
            return (signs * sizes).sum(dim=0)

Nothing here imports torch.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pydantic import Field

from tidewheel.parts import Part
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class Gather:
    """Send tensors of each slot to all workers; the answer has those of all slots, [S, ...] each.

    Args:
        tensors: [own slots, ...] each, of any dtypes.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


class Swap:
    """Send a piece of each own slot to each slot; the answer has the pieces for the own slots, [S, own slots, ...].

    Args:
        tensors: [own slots, S, ...] each, of any dtypes.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


class Sum:
    """Add up a tensor over all slots; the answer is the sum, on every worker.

    Args:
        tensor: fp32 [own slots, ...].
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensors = (tensor,)


Message: TypeAlias = Gather | Swap | Sum
Exchange: TypeAlias = "Generator[Message, Any, torch.Tensor]"
"""Yields messages, gets their answers, and returns the sum of the gradient."""


@dataclass(frozen=True)
class At:
    """Which gradient is summed, and when.

    Args:
        name: of the parameter in the whole model.
        shape: of the parameter.
        count: steps before this one.
        seed: of the run.
        slots: the slots of this worker, whose rows `values` has. A slot sends one compressed gradient: a worker's, or
            that of a virtual rank in reproducible mode.
        all_slots: number of slots of all workers, S.
        state: what `Compression.state` made, as the last step left it.
        new: fill with the new values of `state`, which count unless the step's update is withheld.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    seed: int
    slots: range
    all_slots: int
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    new: dict[str, torch.Tensor] = field(default_factory=dict)


class Compression(Part):
    """Base of every compression of gradients. Its work is `sum`; what `sum` leaves behind is sent with a later step.

    The residual, what a worker has not sent yet, is part of a checkpoint. When the number of workers changes, residuals
    of several workers are added up, so that their sum stays.
    """

    VERSION: ClassVar[Version] = Version("compression")
    """Version of what all compressions share: error feedback and which tensors are compressed."""
    NOT_REPRODUCIBLE: ClassVar[str] = "does not say that it depends on slots alone (NOT_REPRODUCIBLE = \"\")"
    """Why the sum depends on the number of workers; "" if it follows from the values of all slots. Reproducible mode
    refuses a compression with a reason."""

    error_feedback: bool = True
    """Keep what was not sent and add it to the gradient of the next step (https://arxiv.org/abs/1809.07599). false:
    drop it, to see what that costs."""
    warmup_steps: int = Field(default=0, ge=0)
    """Send whole gradients in this many steps at the beginning of the run."""
    only: tuple[str, ...] = ()
    """Compress only the parameters whose names match one of these patterns, "blocks.*.feed_forward.*"; the others are
    sent whole. Empty: all."""
    smallest: int = Field(default=4096, ge=1)
    """Send tensors with fewer elements whole, such as the weights of norms."""

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether a parameter's gradient is compressed.

        Args:
            name: in the whole model.
            shape: of the parameter.
        """
        chosen = not self.only or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.only)
        return chosen and math.prod(shape) >= self.smallest and self.fits(shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape can be compressed and gets smaller."""
        return True

    def state(self, name: str, shape: Sequence[int], seed: int) -> dict[str, torch.Tensor]:
        """Return tensors that `sum` keeps from step to step, the same on all workers, on the CPU.

        Args:
            name: of the parameter.
            shape: of the parameter.
            seed: of the run.
        """
        return {}

    def sum(self, values: torch.Tensor, at: At) -> Exchange:
        """Sum a gradient over all slots: yield messages, and return the sum, [n].

        All workers call it together. A sum that is not finite must stay so, for the guard to see it.

        Args:
            values: fp32 [own slots, n], each slot's gradient and residual. Leave in it what was not sent.
            at: which gradient, and when.
        """
        raise NotImplementedError

    def sent_bytes(self, shape: Sequence[int], workers: int) -> float:
        """Return the bytes that a worker sends for a gradient in a step outside reproducible mode.

        Args:
            shape: of the parameter.
            workers: data-parallel workers, which are the slots.
        """
        raise NotImplementedError


def summed_bytes(elements: float, workers: int) -> float:
    """Return the bytes that a worker sends to sum fp32 elements by a ring's all-reduce."""
    return 4.0 * elements * 2 * (workers - 1) / workers
