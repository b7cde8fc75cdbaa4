"""The base class of objectives: parts that compute sums from a micro-batch and the model's outputs.

    class LabelSmoothing(tw.Objective):
        "Cross-entropy with a share of the target spread over the vocabulary."
        WORKS_WITH = ("tensor", "pipeline", "context")
        METRICS = ("accuracy",)
        smoothing: float = 0.1

        def sums(self, outputs, batch):
            known = batch.targets >= 0
            logits, targets = outputs.logits()[known].float(), batch.targets[known]
            loss = F.cross_entropy(logits, targets, label_smoothing=self.smoothing, reduction="sum")
            return tw.Sums(loss, {"accuracy": (logits.argmax(-1) == targets).sum()})

An objective returns sums instead of means. Training adds them over micro-batches and ranks and divides once, by the sum
of `count` over the global batch, so a step does not depend on how the batch is distributed. This module does not import
torch before training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from tidewheel.errors import ConfigError
from tidewheel.models.config import LossConfig
from tidewheel.parts import Part, calling, name_of
from tidewheel.shards.manifest import PACKED

if TYPE_CHECKING:
    import torch

    from tidewheel.train.step import MicroBatch

Dimension = Literal["tensor", "pipeline", "context"]
DIMENSIONS: tuple[Dimension, ...] = ("tensor", "pipeline", "context")
Bound = Callable[..., "torch.Tensor"]
"""The objective of one micro-batch; the decoder calls it as `models.decoder.HeadObjective` says."""


@dataclass(frozen=True)
class Outputs:
    """The model's outputs for a micro-batch.

    Args:
        hidden: normalised hidden states [B, L, D]; with tensor parallelism, of this rank's positions only.
        make_logits: the model's output layer.
        values: fp32 [B, L] of the value head; None: the model has none.
    """

    hidden: torch.Tensor
    make_logits: Callable[[torch.Tensor], torch.Tensor]
    values: torch.Tensor | None = None

    def logits(self) -> torch.Tensor:
        """Return the logits [B, L, V] of all positions of `batch.tokens`, in the dtype of the matrix products."""
        return self.make_logits(self.hidden)


@dataclass(frozen=True)
class TopK:
    """A teacher's most likely tokens at each position of B rows of L tokens."""

    tokens: torch.Tensor
    """int64 [B, L, K]."""
    log_probabilities: torch.Tensor
    """fp32 [B, L, K + 1]: theirs, then that of all other tokens together."""


@dataclass(frozen=True)
class Sums:
    """The sums that an objective computes for a micro-batch.

    Args:
        loss: the sum to minimise, a scalar with a gradient.
        metrics: sums over the same terms, scalars by the names in `Objective.METRICS`.
    """

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Objective(Part):
    """Base of every objective, the function that training minimises."""

    METRICS: ClassVar[tuple[str, ...]] = ()
    """Names of its metrics. metrics.jsonl has their means over the global batch, under `objective`."""
    WORKS_WITH: ClassVar[tuple[Dimension, ...]] = ()
    """Kinds of parallelism under which the sums stay the same. Data parallelism always works.

    tensor: `outputs.logits()` is whole on every rank of the group; `outputs.hidden` is not. pipeline: the last stage
    has all of a micro-batch. context: a rank has only some positions of each row, so the terms of different positions
    must be independent."""
    READS: ClassVar[str] = PACKED
    """Kind of shard set that it learns from, `shards.manifest.Manifest.kind`."""
    TAKES_UNPAIRED: ClassVar[bool] = False
    """Whether it also learns from preference sets whose rows have one answer, desirable or not."""
    HEAD: ClassVar[int] = 0
    """Outputs of a head that replaces the matrix of logits, which then are [B, L, HEAD]; 0: the decoder's own."""
    VALUES: ClassVar[bool] = False
    """Whether a value head beside the output layer estimates the return from each position on, `Outputs.values`."""
    UNDECISIVE: ClassVar[tuple[str, ...]] = ()
    """Settings that change how sums are computed but not their values; the recipe hash leaves them out."""

    def sums(self, outputs: Outputs, batch: MicroBatch) -> Sums:
        """Return the sums of one micro-batch, a pure function of its arguments.

        Args:
            outputs: the model's outputs for `batch.tokens`.
            batch: this rank's rows; `targets` [B, L] has the next tokens, negative at positions without a target.
        """
        raise NotImplementedError

    def first(self, outputs: Outputs, batch: MicroBatch) -> torch.Tensor:
        """Return a scalar sum of a pass without gradients over `MicroBatch.mismatched`, before any that has some.

        Its sum over the global batch, divided by that of `count`, is `MicroBatch.whole`. In validation, whose
        micro-batches are computed one by one, it is that of the micro-batch. For objectives that look first.

        Args:
            outputs: the model's outputs for `batch.tokens`.
            batch: the mismatched rows.
        """
        raise NotImplementedError

    def rewards(self, outputs: Outputs, batch: MicroBatch) -> torch.Tensor:
        """Return the reward of each row, fp32 [B]; for objectives whose `HEAD` is 1.

        Args:
            outputs: see `sums`.
            batch: see `sums`.
        """
        raise NotImplementedError

    def count(self, batch: MicroBatch) -> int:
        """Return the number of terms in a micro-batch's sums; by default its number of targets."""
        return batch.num_targets

    def token_loss(self) -> LossConfig:
        """Return how to compute the cross-entropy, which validation measures on packed sequences."""
        return LossConfig()

    @property
    def parts(self) -> int:
        """Sequences of each pair that it needs, see `shards.pairs`; 1 for packed sequences."""
        return 1

    @property
    def looks_first(self) -> bool:
        """Whether it needs a sum over the global batch before a gradient, see `first`."""
        return False

    @property
    def head_kind(self) -> str:
        """Kind of its head in transformers: "outcome", of sequences, or "process", of tokens; "": it has none there."""
        return ""

    @classmethod
    def settings_of_head(cls, kind: str) -> dict[str, str] | None:
        """Return the settings with which the head is of this `head_kind`; None: it never is."""
        return None

    @property
    def takes_steps(self) -> bool:
        """Whether it learns from labels of the steps of answers, `MicroBatch.step_labels`."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether it needs log-probabilities under a reference model, `data.reference`."""
        return False

    @property
    def needs_teacher(self) -> bool:
        """Whether it compares with a teacher, `MicroBatch.teacher`."""
        return False

    @property
    def logit_tokens(self) -> int | None:
        """Tokens whose logits are in memory at once; 0: the whole micro-batch, None: `models.loss.chunk_rows`."""
        return 0

    def bound(self, batch: MicroBatch) -> Bound | None:
        """Return the objective of one micro-batch, for the decoder; None: the decoder's own cross-entropy.

        The function returns the loss, a scalar. With metrics it returns the loss and the metrics in their order,
        [1 + metrics].
        """
        import torch

        def of(hidden: torch.Tensor, make_logits: Callable[[torch.Tensor], torch.Tensor],
               values: torch.Tensor | None = None) -> torch.Tensor:
            with calling(self):
                sums = self.sums(Outputs(hidden, make_logits, values), batch)
            _check(self, sums)
            loss = sums.loss.float()
            if not self.METRICS:
                return loss
            return torch.stack([loss, *(sums.metrics[name].detach().float() for name in self.METRICS)])

        return of


def reason_against(objective: Objective, sizes: Mapping[Dimension, int]) -> str | None:
    """Return why an objective cannot run on a mesh of these sizes, with the nearest legal mesh; None if it can."""
    for name, size in sizes.items():
        if size > 1 and name not in objective.WORKS_WITH:
            works = " and ".join(("data", *objective.WORKS_WITH))
            return (f"objective.kind {name_of(type(objective))} works with {works} parallelism (WORKS_WITH), but "
                    f"parallel.{name} is {size}; nearest legal choice: parallel.{name} 1")
    return None


def _check(objective: Objective, sums: Sums) -> None:
    """Raise ConfigError unless an objective returned a scalar loss and the metrics that it names."""
    where = f"objective.kind {name_of(type(objective))}"
    if not isinstance(sums, Sums):
        raise ConfigError(f"sums returned {type(sums).__name__}, which is not tw.Sums", where=where,
                          fix="return tw.Sums(loss, {metric: sum})")
    for name, value in {"the loss": sums.loss, **sums.metrics}.items():
        if getattr(value, "ndim", None) != 0:
            shape = list(value.shape) if hasattr(value, "shape") else type(value).__name__
            raise ConfigError(f"{name} is {shape}, but must be a scalar tensor", where=where,
                              fix="sum over the micro-batch")
    if set(sums.metrics) != set(objective.METRICS):
        raise ConfigError(f"sums returned the metrics {sorted(sums.metrics)}, but METRICS names "
                          f"{sorted(objective.METRICS)}", where=where, fix="list the returned metrics in METRICS")
