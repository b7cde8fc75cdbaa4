"""Estimate the curvature for optimizers that want it, from the gradient of labels that the model itself draws.

For the cross-entropy, T g^2 is an unbiased estimate of the diagonal of the Gauss-Newton matrix, where g is the mean
gradient of T tokens whose labels are drawn from the model's own distribution (https://arxiv.org/abs/2305.14342,
algorithm 2). A label is a function of the run's seed, the step, and the token's place in the global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch.utils.checkpoint import checkpoint

from tidewheel.models.loss import IGNORED, chunk_rows, cross_entropy
from tidewheel.train.objective import Bound
from tidewheel.train.step import MicroBatch, find_gradients
from tidewheel.train.training import Training


class Curvature:
    """Lets the optimizer estimate the curvature every few steps.

    Args:
        training: this worker's share of the run.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._every = training, training.config.optimizer.curvature_every

    def before(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Estimate the curvature from the batch of a step, if it is due. All ranks call it before the step.

        Args:
            step: counts from 1.
            micro_batches: of this rank.
        """
        if not self._every or (step - 1) % self._every:
            return
        training = self._training
        model, seed = training.model, training.config.seed
        numbers = model.share.of(model.share.total(len(micro_batches)))
        drawn = {id(micro): random_numbers(seed, step, number, micro.tokens.shape)
                 for number, micro in zip(numbers, micro_batches)}

        def bound(micro: MicroBatch) -> Bound:
            return of_drawn_labels(micro, drawn[id(micro)])

        find_gradients(model, micro_batches, training.device, training.config.precision, None, bound)
        own = sum(micro.num_targets for micro in micro_batches) if model.mesh.leads else 0
        collectives = training.collectives
        targets = float(collectives.to_host(collectives.sum(torch.tensor([own], dtype=torch.float64))))
        if targets:
            training.optimizer.take_curvature(targets)


def random_numbers(seed: int, step: int, micro_batch: int, shape: Sequence[int]) -> torch.Tensor:
    """Return a number in [0, 1) for each token of a micro-batch, fp64 of `shape`.

    Args:
        seed: of the run.
        step: of the run.
        micro_batch: index in the step.
        shape: of the tokens.
    """
    key = hashlib.blake2b(f"curvature {seed} {step} {micro_batch}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float64)


def draw(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return a label for each row, int64 [N], drawn from the softmax of its logits.

    Args:
        logits: [N, V].
        numbers: fp64 [N] in [0, 1).
    """
    reached = logits.detach().double().softmax(dim=-1).cumsum(dim=-1)
    drawn = torch.searchsorted(reached, (numbers.to(logits.device) * reached[:, -1])[:, None], right=True)
    return drawn[:, 0].clamp(max=logits.shape[1] - 1)


def of_drawn_labels(micro: MicroBatch, numbers: torch.Tensor) -> Bound:
    """Return the objective that sums the cross-entropy of drawn labels, in the places of a micro-batch's targets.

    Args:
        micro: the micro-batch.
        numbers: see `random_numbers`.
    """
    known, drawn_by = (micro.targets >= 0).flatten(), numbers.flatten()

    def loss(hidden: torch.Tensor, known: torch.Tensor, numbers: torch.Tensor,
             make_logits: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        logits = make_logits(hidden)
        return cross_entropy(logits, torch.where(known, draw(logits, numbers), IGNORED))

    def of(hidden: torch.Tensor, make_logits: Callable[[torch.Tensor], torch.Tensor],
           values: torch.Tensor | None = None) -> torch.Tensor:
        rows = hidden.flatten(0, -2)
        with torch.no_grad():
            vocabulary_size = make_logits(rows[:1]).shape[-1]
        size = chunk_rows(len(rows), 3 * vocabulary_size, None, hidden.device)  # probabilities are fp64
        parts = zip(rows.split(size), known.split(size), drawn_by.split(size))
        if size == len(rows):
            return loss(rows, known, drawn_by, make_logits)
        return torch.stack([checkpoint(loss, *part, make_logits, use_reentrant=False, preserve_rng_state=False)
                            for part in parts]).sum()

    return of
