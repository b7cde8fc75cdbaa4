"""A pass without gradients over mismatched answers, whose mean over the global batch an objective needs beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tidewheel.train.collectives import Collectives
from tidewheel.train.objective import Objective, Outputs
from tidewheel.train.parallel.before import Before

if TYPE_CHECKING:
    from tidewheel.train.parallel.model import ParallelModel
    from tidewheel.train.step import MicroBatch


class FirstLook(Before):
    """Sums of `Objective.first`, with one entry for each micro-batch of the global batch.

    One rank contributes to each entry, so their sum over ranks is exact and the same for every number of workers.

    Args:
        model: computes the pass.
        objective: looks first.
        collectives: over all ranks.
        reference: completes micro-batches with the reference model; None: their data have its log-probabilities.
    """

    def __init__(self, model: ParallelModel, objective: Objective, collectives: Collectives,
                 reference: Before | None) -> None:
        self._model, self._objective, self._collectives = model, objective, collectives
        self._reference = reference
        self._mean: torch.Tensor | None = None

    def begin(self, micros: Sequence[MicroBatch], context: AbstractContextManager[None], *, whole: bool) -> None:
        model = self._model
        total = model.share.total(len(micros)) if whole else len(micros)
        entries = torch.zeros(total, 2, dtype=torch.float64, device=self._collectives.device)
        own = model.share.of(total) if whole else range(total)
        counts = not whole or model.mesh.coordinate("tensor") == 0
        for index, micro in zip(own, micros):
            found = self._sum(micro, context)
            if found is not None and counts:
                entries[index, 0] = found.double()
                entries[index, 1] = self._objective.count(micro)
        if whole:
            entries = self._collectives.sum(entries)
        found, pairs = entries.sum(dim=0).unbind()
        self._mean = (found / pairs.clamp(min=1)).float()

    def _sum(self, micro: MicroBatch, context: AbstractContextManager[None]) -> torch.Tensor | None:
        """Return the sum over a micro-batch; None on ranks without the last stage of a pipeline."""
        mismatched = micro.mismatched
        assert mismatched is not None, "`Objective.parts` asks for it"
        if self._reference is not None:
            mismatched = self._reference.of(mismatched, context)

        def first(hidden: torch.Tensor, make_logits: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            return self._objective.first(Outputs(hidden, make_logits), mismatched)

        return self._model.forward(mismatched, context, first)

    def of(self, micro: MicroBatch, context: AbstractContextManager[None]) -> MicroBatch:
        completed = micro if self._reference is None else self._reference.of(micro, context)
        return replace(completed, whole=self._mean)

    def finish(self) -> None:
        self._mean = None
