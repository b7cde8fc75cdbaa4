"""What is computed for a micro-batch before the pass that has gradients, by a model that is not trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from tidewheel.train.objective import Outputs
from tidewheel.train.precision import precision_context

if TYPE_CHECKING:
    from tidewheel.train.parallel.model import ParallelModel
    from tidewheel.train.step import MicroBatch


class Before(Protocol):
    """Completes micro-batches. All ranks of the run call its methods together."""

    def begin(self, micros: Sequence[MicroBatch], context: AbstractContextManager[None], *, whole: bool) -> None:
        """Compute what depends on several micro-batches, before `of` is called for the first.

        Args:
            micros: this rank's part of a step, or the only one of a validation.
            context: entered around a forward pass.
            whole: whether the other ranks' micro-batches count too.
        """

    def of(self, micro: MicroBatch, context: AbstractContextManager[None]) -> MicroBatch:
        """Return a micro-batch with what the objective needs beside it.

        Args:
            micro: this rank's part of the rows.
            context: entered around a forward pass.
        """

    def finish(self) -> None:
        """Free what was gathered, after the last micro-batch of a step."""


class Teacher(Before):
    """A frozen teacher, in the layout of the student: its outputs stay until the step ends.

    Args:
        model: this rank's part of the teacher.
        in_bf16: compute in bf16 whatever the student's precision is.
    """

    def __init__(self, model: ParallelModel, *, in_bf16: bool = False) -> None:
        self.model, self._in_bf16 = model, in_bf16

    def begin(self, micros: Sequence[MicroBatch], context: AbstractContextManager[None], *, whole: bool) -> None:
        return

    def of(self, micro: MicroBatch, context: AbstractContextManager[None]) -> MicroBatch:
        if self._in_bf16:
            context = precision_context(micro.tokens.device, "bf16")
        kept: list[Outputs] = []

        def keep(hidden: torch.Tensor, make_logits: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            kept.append(Outputs(hidden, make_logits))
            return hidden

        self.model.forward(micro, context, keep)
        return replace(micro, teacher=kept[0]) if kept else micro  # only the last stage of a pipeline compares

    def finish(self) -> None:
        self.model.reshard()
