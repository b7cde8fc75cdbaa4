"""The frozen base of an adapter as the reference model of preferences: the same weights, with the adapter off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tidewheel.models.adapting.attach import adapters_off
from tidewheel.train.objective import Objective, Outputs
from tidewheel.train.parallel.before import Before
from tidewheel.train.preferences.log_probabilities import answers

if TYPE_CHECKING:
    from tidewheel.train.parallel.model import ParallelModel
    from tidewheel.train.step import MicroBatch


class BaseReference(Before):
    """Log-probabilities of answers under the base, by a forward pass without gradients before each training pass.

    That costs a third of the FLOPs of a step more, and no memory. It is the base as it is kept (NF4 included), in the
    precision of the run. Log-probabilities in `data.reference` are computed once instead.

    Args:
        model: with the adapter.
        objective: of pairs.
    """

    def __init__(self, model: ParallelModel, objective: Objective) -> None:
        self._model, self._chunk_tokens = model, objective.logit_tokens or 0

    def begin(self, micros: Sequence[MicroBatch], context: AbstractContextManager[None], *, whole: bool) -> None:
        return

    def of(self, micro: MicroBatch, context: AbstractContextManager[None]) -> MicroBatch:
        def sums(hidden: torch.Tensor, make_logits: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            return answers(Outputs(hidden, make_logits), micro, self._chunk_tokens).sums

        with adapters_off(self._model.parts):
            reference = self._model.forward(micro, context, sums)
        return micro if reference is None else replace(micro, reference=reference)

    def finish(self) -> None:
        return
