"""The interface between the loop and what exchanges weights with the other groups of a DiLoCo run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from tidewheel.train.training import Training


class OuterExchange(Protocol):
    """Meets the other groups of a run. All ranks of this group make the same calls, at step boundaries.

    Before `begin` and `meet`, wait for the copies that a save makes of the weights, because both may change them.

    The outcome of a round is in storage before any weight changes, so a worker that repeats steps takes it again.
    """

    def restore(self, saved: list[dict[str, Any]]) -> None:
        """Continue from the `state` of the checkpoint whose tensors were loaded; not called if it had none.

        Until `begin`, `state` returns the same, because the state is copied to memory before.
        """

    def begin(self, step: int) -> None:
        """Begin to take part after a step whose weights are set; it may replace them.

        Args:
            step: the last step done.
        """

    def is_due(self, step: int) -> bool:
        """Return whether `meet` must be called after this step, before any other task of the step boundary."""

    def meet(self, step: int, ask: Callable[[], int]) -> int:
        """Take part in a round and change the weights to its outcome. Call it again while `is_due`.

        Args:
            step: the last step done.
            ask: returns the cluster's requests to rank 0, 0 for none.

        Returns:
            The requests that interrupted the wait for other groups, on all ranks; 0 if the outcome is taken.

        Raises:
            StorageError: the store was unavailable for too long.
        """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors for a checkpoint by path, which share the exchange's memory."""

    def state(self) -> list[dict[str, Any]]:
        """Return the JSON values for a checkpoint."""

    def base(self) -> int:
        """Return the number of the outer state that the weights go on from, added over fragments."""

    def figures(self) -> dict[str, float]:
        """Return what the last round sent, read and took, for the metrics; {} after it was called."""


OpenOuter: TypeAlias = "Callable[[Training], OuterExchange]"
"""Opens the exchange of one worker; all ranks call it together. It must not keep the `Training`, which holds it."""
