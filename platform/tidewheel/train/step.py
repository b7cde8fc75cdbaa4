"""One optimizer step, the same function of the global batch however many ranks share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tidewheel.train.collectives import Collectives
from tidewheel.train.guards.policy import Guard, Verdict
from tidewheel.train.optim.model_optimizer import ModelOptimizer
from tidewheel.train.parallel import ParallelModel, local
from tidewheel.train.precision import LossScale, Precision, precision_context
from tidewheel.train.reproducible import norm as reproducible_norm

STOP, SAVE = 1, 2
"""What rank 0 may ask for with a step: make way for a planned change, save."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and backward pass; all four tensors are [B, L]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    segment_ids: torch.Tensor
    targets: torch.Tensor
    virtual_rank: int
    num_tokens: int
    """Tokens that are not padding."""
    num_targets: int
    """Positions with something to predict."""


@dataclass(frozen=True)
class StepResult:
    """The same on every rank."""

    loss: float
    """The objective's, per term (cross-entropy: nats per target token), over the global batch."""
    gradient_norm: float
    """Before clipping."""
    tokens: int
    """Real tokens in the global batch."""
    targets: int
    """Terms of the objective: tokens that were predicted."""
    asked: int
    """What rank 0 asked for, as all ranks heard it: any of `STOP` and `SAVE`."""
    verdict: Verdict
    """What the guard says."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the objective measures: its metrics per term."""

    @classmethod
    def of(cls, values: Sequence[float], verdict: Verdict, metrics: Sequence[str] = ()) -> StepResult:
        """From the numbers of all fields in their order, and then those of `metrics`."""
        loss, norm, tokens, targets, asked = values[:5]
        return cls(loss, norm, int(tokens), int(targets), int(asked), verdict, dict(zip(metrics, values[5:])))


def train_step(model: ParallelModel, optimizer: ModelOptimizer, micro_batches: Sequence[MicroBatch],
               collectives: Collectives, *, virtual_ranks: int, clip_norm: float = 0.0,
               precision: Precision = "fp32", loss_scale: LossScale | None = None, asked: int = 0,
               guard: Guard | None = None, before_update: Callable[[], None] = lambda: None) -> StepResult:
    """Forward, backward, clip, update, unless `guard` withholds the update. Values change after `before_update` only.

    Gradients are of the SUM of the objective's terms (token losses); after the last micro-batch they are divided by
    their global number, once. Losses travel as one entry per virtual rank, together with the objective's metrics, the
    counts, the squared gradient norm and what rank 0 asks for: one small all-reduce per step. In reproducible mode all
    that it adds is exact.
    """
    model.zero_grad()
    tokens_at_most = sum(micro.tokens.numel() for micro in micro_batches) * model.mesh.data_size
    scaled = 1.0 if loss_scale is None else loss_scale.of_sums(tokens_at_most)
    losses = model.forward_backward(micro_batches, precision_context(collectives.device, precision),
                                    scale=None if loss_scale is None else scaled)
    gradients = [(p, local(p.grad)) for p in model.parameters() if p.grad is not None]
    chosen = collectives.to_device(_owners(model, micro_batches, virtual_ranks))
    names = model.objective.METRICS
    entries = (chosen @ losses.double()).flatten()
    squares = _squares(model, gradients).to(collectives.device)
    report = torch.cat([collectives.to_device(_counts(model, micro_batches, asked)), entries, squares])
    collectives.sum(report)

    targets, tokens, heard = report[:3].unbind()
    targets, (entries, squares) = targets.clamp(min=1), report[3:].split([len(entries), len(squares)])
    square = squares.sum() if model.order is None else reproducible_norm.value(squares)
    columns = entries.view(-1, 1 + len(names))
    loss, norm = columns[:, 0].sum() / targets, square.sqrt() / (targets * scaled)
    scale = torch.where(norm > clip_norm, clip_norm / norm, 1.0) if clip_norm > 0 else torch.ones_like(norm)
    if gradients:
        first = gradients[0][1]
        torch._foreach_mul_([g for _, g in gradients], (scale / (targets * scaled)).to(first.device, first.dtype))
    if guard is None:
        judged, skip = report.new_zeros(4), norm.isfinite().logical_not() if loss_scale is not None else None
    else:
        judged = guard.judge(loss, norm)
        skip = judged[-1]
    before_update()
    optimizer.step(skip=skip)
    model.refresh()
    metrics = columns[:, 1:].sum(dim=0) / targets
    values = torch.cat([torch.stack([loss, norm, tokens, targets, heard]), metrics, judged]).tolist()
    return StepResult.of(values[:-4], guard.verdict(values[-4:]) if guard is not None else Verdict(), names)


def _counts(model: ParallelModel, micro_batches: Sequence[MicroBatch], asked: int) -> torch.Tensor:
    """What the host knows of a step: targets and tokens, of each data rank once, and what is asked; [3] fp64 on CPU."""
    counts = torch.zeros(3, dtype=torch.float64)
    if model.mesh.leads:
        counts[0] = sum(model.objective.count(micro) for micro in micro_batches)
        counts[1] = sum(micro.num_tokens for micro in micro_batches)
    counts[2] = float(asked)
    return counts


def _owners(model: ParallelModel, micro_batches: Sequence[MicroBatch], virtual_ranks: int) -> torch.Tensor:
    """Which micro-batch's loss belongs to which entry of the report, [entries, micro-batches] of 0 and 1, fp64 on CPU.
    An entry is a virtual rank; in reproducible mode a micro-batch on a context rank: no two losses share one."""
    number, order = len(micro_batches), model.order
    if order is None:
        entries, owners = virtual_ranks, [micro.virtual_rank for micro in micro_batches]
    else:
        entries, owners = order.entries(number), [order.entry(index, number) for index in range(number)]
    chosen = torch.zeros(entries, number, dtype=torch.float64)
    chosen[owners, range(number)] = 1
    return chosen


def _squares(model: ParallelModel, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """This rank's share of the squared norm of the whole gradient: [1] fp64, the sum of squares; in reproducible mode
    the `pieces` of it."""
    if model.order is None:
        return squared_norm(model, gradients)[None]
    own = [gradient for parameter, gradient in gradients if gradient.numel() and model.first_holder(parameter)]
    sums = reproducible_norm.row_squares(own) if own else torch.zeros(0, dtype=torch.float64)
    return reproducible_norm.pieces(sums)


def squared_norm(model: ParallelModel, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """This rank's share of the squared norm of the whole gradient: shares of all ranks add up to it, on every mesh.

    Args:
        gradients: pairs of a parameter and the local part of its gradient.

    Returns:
        fp64 scalar: the sum of squares of each tensor, in its own precision, over the ranks that hold the same;
        tensors added in fp64.
    """
    alike: dict[int, list[torch.Tensor]] = {}
    for parameter, gradient in gradients:
        if gradient.numel():
            alike.setdefault(model.replicas(parameter), []).append(gradient)
    shares = [torch.stack([norm.double() for norm in torch._foreach_norm(held)]).square().sum() / replicas
              for replicas, held in alike.items()]
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)
