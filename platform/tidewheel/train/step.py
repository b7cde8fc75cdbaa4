"""One optimizer step: the same function of the global batch for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec

import torch

from tidewheel.models.documents import Documents
from tidewheel.models.noise import EmbeddingNoise
from tidewheel.train.collectives import Collectives, Later
from tidewheel.train.guards.policy import Guard, Verdict
from tidewheel.train.optim.model_optimizer import ModelOptimizer
from tidewheel.train.parallel import ParallelModel, local
from tidewheel.train.parallel.expert_load import LayerLoad
from tidewheel.train.precision import LossScale, Precision, precision_context
from tidewheel.train.reproducible import norm as reproducible_norm

if TYPE_CHECKING:
    from tidewheel.train.objective import Bound, Outputs, TopK

P = ParamSpec("P")
Loads = Callable[[Sequence[float]], Mapping[int, LayerLoad]]
STOP, SAVE, KEEP = 1, 2, 4
"""Requests of rank 0 that travel with a step: end this generation for a planned change; save; copy to the memory
tier."""
WAIT = 8
"""Rank 0 expects requests after the next step, so that no rank starts the step after it before they are known."""
CANNOT_KEEP = 16
"""What a rank adds to the requests when it cannot make a copy now. The sum over ranks holds it once for each of them,
above the bits of rank 0's requests."""


@dataclass(frozen=True)
class RolloutColumns:
    """What rows of rollouts have besides their tokens; values stand where the token is a target."""

    sampled: torch.Tensor
    """fp32 [B, L]: log-probability of each target under the policy that sampled it; 0 where there is no target."""
    advantages: torch.Tensor
    """fp32 [B], or [B, L] if targets have their own."""
    referred: torch.Tensor | None = None
    """fp32 [B, L]: log-probability of each target under the reference model; None: not known."""
    values: torch.Tensor | None = None
    """fp32 [B, L]: estimate of the return from each target on when it was sampled; None: not known."""
    returns: torch.Tensor | None = None
    """fp32 [B, L]: what a value head learns; None: not known."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and backward pass; the first four tensors are [B, L]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    segment_ids: torch.Tensor
    targets: torch.Tensor
    virtual_rank: int
    num_tokens: int
    """Tokens that are not padding."""
    num_targets: int
    """Positions with a target to predict."""
    documents: Documents | None = None
    """Where documents begin, `Documents.of(segment_ids)`. None: the model finds them on the device and waits for it."""
    parts: int = 1
    """Rows of each pair, in this order: chosen, rejected. 1: the set has no pairs."""
    reference: torch.Tensor | None = None
    """[B / parts, parts] fp32: log-probabilities of answers under the reference model (`shards.references`)."""
    sources: tuple[int, ...] = ()
    """Index of each row's source in the training data, if losses are reported by source."""
    row_targets: tuple[int, ...] = ()
    """Positions with a target in each row, if losses are reported by source."""
    noise: EmbeddingNoise | None = None
    """Is added to the embeddings while training."""
    margins: torch.Tensor | None = None
    """[B / parts] fp32: by how much the chosen answers are better; None: the set has no margins."""
    desirable: torch.Tensor | None = None
    """[B] bool: whether each answer is desirable, of a set without pairs; None: rows come in pairs."""
    mismatched: MicroBatch | None = None
    """Rows of each pair's prompt with the answer to another prompt, for `Objective.first`."""
    whole: torch.Tensor | None = None
    """What `Objective.first` has found over the global batch."""
    teacher: TopK | Outputs | None = None
    """What a teacher says of the rows: its most likely tokens (`shards.teachers`), or its outputs."""
    rollouts: RolloutColumns | None = None
    """Of a set of rollouts."""
    step_labels: torch.Tensor | None = None
    """[B, L] int8: 1 at the end of a right step of an answer, 0 at that of a wrong one, else -1; None: the set has
    none."""
    num_steps: int = 0
    """Steps with a label."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, the same on every rank."""

    loss: float
    """The objective's loss per term over the global batch; for cross-entropy, nats per target token."""
    gradient_norm: float
    """Norm of the whole gradient before clipping."""
    tokens: int
    """Real tokens in the global batch."""
    targets: int
    """Terms of the objective; for cross-entropy, predicted tokens."""
    asked: int
    """Requests of rank 0, known to all ranks: any of `STOP`, `SAVE`, `KEEP` and `WAIT`; plus `CANNOT_KEEP` times the
    number of ranks that cannot keep."""
    verdict: Verdict
    """The guard's verdict."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The objective's metrics per term."""
    experts: Mapping[int, LayerLoad] = field(default_factory=dict)
    """Load of the experts of each layer that has some."""
    sources: Sequence[tuple[float, int]] = ()
    """Nats and predicted tokens of each source, if losses are reported by source."""

    @classmethod
    def of(cls, values: Sequence[float], verdict: Verdict, metrics: Sequence[str] = (),
           loads: Loads = lambda values: {}, sources: int = 0) -> StepResult:
        """Return the result of a step's numbers.

        Args:
            values: loss, norm, tokens, targets and requests, then the metrics, then nats and targets of each source,
                then the load of experts.
            verdict: the guard's.
            metrics: names of the metrics.
            loads: reads the load of experts.
            sources: number of sources.
        """
        loss, norm, tokens, targets, asked = values[:5]
        end = 5 + len(metrics)
        nats, counts = values[end:end + sources], values[end + sources:end + 2 * sources]
        return cls(loss, norm, int(tokens), int(targets), int(asked), verdict, dict(zip(metrics, values[5:end])),
                   loads(values[end + 2 * sources:]), [(sum_, int(count)) for sum_, count in zip(nats, counts)])


class StartedStep:
    """A step that the host has enqueued; the device may still compute it.

    Args:
        values: waits for the step's numbers, as in `StepResult.of`, and the guard's judgement [4] behind them.
        guard: judges the step.
        metrics: names of the objective's metrics.
        loads: reads the load of experts, see `StepResult.of`.
        sources: number of sources.
        gradient_bytes: bytes of gradients that this rank has sent; None: not known.
    """

    def __init__(self, values: Later[torch.Tensor], guard: Guard | None, metrics: Sequence[str],
                 loads: Loads = lambda values: {}, sources: int = 0, gradient_bytes: int | None = None) -> None:
        self.gradient_bytes = gradient_bytes
        self._values, self._guard, self._metrics, self._loads = values, guard, metrics, loads
        self._sources = sources
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Wait for the step and return its result. Call it for the steps in their order: the guard counts them.

        Raises:
            AbortedError: the process group was broken off, so neither the result nor the parameters count.
        """
        if self._result is None:
            values = self._values().tolist()
            verdict = self._guard.verdict(values[-4:]) if self._guard is not None else Verdict()
            self._result = StepResult.of(values[:-4], verdict, self._metrics, self._loads, self._sources)
        return self._result

    def drop(self) -> None:
        """Wait until the device is done with a step that does not count, so that its tensors may be replaced."""
        self._values()


def start_step(model: ParallelModel, optimizer: ModelOptimizer, micro_batches: Sequence[MicroBatch],
               collectives: Collectives, *, virtual_ranks: int, clip_norm: float = 0.0,
               precision: Precision = "fp32", loss_scale: LossScale | None = None,
               ask: Callable[[], int] = lambda: 0, guard: Guard | None = None,
               before_update: Callable[[], None] = lambda: None, sources: int = 0) -> StartedStep:
    """Enqueue forward, backward, clipping and the update, unless `guard` withholds the update.

    Gradients are of the SUM of the objective's terms (token losses). The optimizer multiplies them once, by the factor
    that clips and divides by the global number of terms. One small all-reduce per step carries the losses (one entry
    per virtual rank), the objective's metrics, the losses of sources, the counts, the squared gradient norm, the load
    of experts and the requests of rank 0. In reproducible mode all its sums are exact.

    Args:
        model: this rank's part of the model.
        optimizer: updates the parameters.
        micro_batches: of this rank.
        collectives: over all ranks.
        virtual_ranks: of the run.
        clip_norm: clip the gradient to this norm; 0: do not.
        precision: number type of the matrix products.
        loss_scale: scales fp16 gradients.
        ask: called after the backward pass; returns this rank's part of `StepResult.asked`.
        guard: judges the step.
        before_update: called before any parameter changes.
        sources: number of sources whose losses are reported; 0: none are.
    """
    overlapped, norms = optimizer.overlapped, None
    if overlapped is not None:  # nothing clips or withholds its updates
        terms = torch.tensor([_counted(model, micro_batches)], dtype=torch.float64)
        before_update()
        overlapped.begin(1.0 / collectives.sum(terms).clamp(min=1)[0])
    losses, scaled = find_gradients(model, micro_batches, collectives.device, precision, loss_scale)
    if overlapped is not None:
        norms = overlapped.finish()
    gradients = [(p, local(p.grad)) for p in model.parameters() if p.grad is not None]
    chosen = collectives.to_device(_owners(model, micro_batches, virtual_ranks))
    names = model.objective.METRICS
    if sources:
        losses = torch.cat((losses.double().view(len(losses), -1), by_source(model, micro_batches, sources)), dim=1)
    entries = (chosen @ losses.double()).flatten()
    squares = _squares(model, gradients, norms).to(collectives.device)
    load = model.experts.report(collectives.device)
    counts = _counts(model, micro_batches, ask(), sources)
    report = torch.cat([collectives.to_device(counts), entries, squares, load])
    collectives.sum(report)

    counts, entries, squares, load = report.split([len(counts), len(entries), len(squares), len(load)])
    targets, tokens, heard = counts[:3].unbind()
    targets = targets.clamp(min=1)
    square = squares.sum() if model.order is None else reproducible_norm.value(squares)
    columns = entries.view(-1, 1 + len(names) + sources)
    loss, norm = columns[:, 0].sum() / targets, square.sqrt() / (targets * scaled)
    scale = torch.where(norm > clip_norm, clip_norm / norm, 1.0) if clip_norm > 0 else torch.ones_like(norm)
    if guard is None:
        judged, skip = report.new_zeros(4), norm.isfinite().logical_not() if loss_scale is not None else None
    else:
        judged = guard.judge(loss, norm)
        skip = judged[-1]
    if overlapped is None:
        before_update()
    model.experts.balance(load, skip)
    model.keep_unsent(skip)
    if overlapped is None:
        optimizer.step(skip=skip, factor=scale / (targets * scaled))
    model.refresh()
    metrics, nats = columns[:, 1:].sum(dim=0).split([len(names), sources])
    on_device = torch.cat([torch.stack([loss, norm, tokens, targets, heard]), metrics / targets, nats, counts[3:], load,
                           judged])
    return StartedStep(collectives.to_host_later(on_device), guard, names, model.experts.loads, sources,
                       model.gradient_bytes())


def find_gradients(model: ParallelModel, micro_batches: Sequence[MicroBatch], device: torch.device,
                   precision: Precision, loss_scale: LossScale | None,
                   bound: Callable[[MicroBatch], Bound] | None = None) -> tuple[torch.Tensor, float]:
    """Replace the gradients by those of a step's batch, summed over ranks.

    Args:
        model: this rank's part of the model.
        micro_batches: of this rank.
        device: that computes.
        precision: number type of the matrix products.
        loss_scale: scales fp16 gradients.
        bound: returns what to minimise in a micro-batch; default: the model's objective.

    Returns:
        the losses of `ParallelModel.forward_backward`, and the factor of the gradients.
    """
    model.zero_grad()
    tokens_at_most = micro_batches[0].tokens.numel() * model.share.total(len(micro_batches))  # fp16 has one shape
    scaled = 1.0 if loss_scale is None else loss_scale.of_sums(tokens_at_most)
    losses = model.forward_backward(micro_batches, precision_context(device, precision),
                                    scale=None if loss_scale is None else scaled, bound=bound)
    return losses, scaled


def _waited(start: Callable[P, StartedStep]) -> Callable[P, StepResult]:
    def step(*arguments: P.args, **named: P.kwargs) -> StepResult:
        return start(*arguments, **named).result()

    return step


train_step = _waited(start_step)
"""`start_step`, and wait for its result."""


def by_source(model: ParallelModel, micro_batches: Sequence[MicroBatch], sources: int) -> torch.Tensor:
    """Return the losses of each source in each micro-batch of the last passes, fp64 [micro-batches, sources].

    Args:
        model: this rank's part of the model.
        micro_batches: of this rank.
        sources: number of sources.
    """
    of_rows = model.row_losses(micro_batches)
    owners = torch.tensor([micro.sources for micro in micro_batches], dtype=torch.int64)
    chosen = torch.nn.functional.one_hot(owners, sources).double()
    if of_rows.device.type != "cpu":
        chosen = chosen.pin_memory().to(of_rows.device, non_blocking=True)
    return (chosen * of_rows[:, :, None]).sum(dim=1)


def _counts(model: ParallelModel, micro_batches: Sequence[MicroBatch], asked: int, sources: int) -> torch.Tensor:
    """Return targets, tokens and requests, then the targets of each source, fp64 [3 + sources] on CPU.

    Each data rank counts its targets and tokens once.
    """
    counts = torch.zeros(3 + sources, dtype=torch.float64)
    if model.mesh.leads:
        counts[0] = _counted(model, micro_batches)
        counts[1] = sum(micro.num_tokens for micro in micro_batches)
        for micro in micro_batches if sources else ():
            for source, count in zip(micro.sources, micro.row_targets):
                counts[3 + source] += count
    counts[2] = float(asked)
    return counts


def _counted(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> float:
    """Return the terms of the objective that this rank counts; each data rank counts its own once."""
    return float(sum(model.objective.count(micro) for micro in micro_batches)) if model.mesh.leads else 0.0


def _owners(model: ParallelModel, micro_batches: Sequence[MicroBatch], virtual_ranks: int) -> torch.Tensor:
    """Return which entry of the report gets each micro-batch's loss: [entries, micro-batches] of 0 and 1, fp64 on CPU.

    There is an entry for each virtual rank; in reproducible mode, for each micro-batch on each context rank.
    """
    number, order = len(micro_batches), model.order
    if order is None:
        entries, owners = virtual_ranks, [micro.virtual_rank for micro in micro_batches]
    else:
        entries, owners = order.entries(number), [order.entry(index, number) for index in range(number)]
    chosen = torch.zeros(entries, number, dtype=torch.float64)
    chosen[owners, range(number)] = 1
    return chosen


def _squares(model: ParallelModel, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]],
             norms: Mapping[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
    """Return this rank's share of the squared norm of the whole gradient, fp64; see `squared_norm`.

    It is [1], the sum of squares; in reproducible mode, the `pieces` of that sum.
    """
    if model.order is None:
        return squared_norm(model, gradients, norms)[None]
    own = [gradient for parameter, gradient in gradients if gradient.numel() and model.first_holder(parameter)]
    sums = reproducible_norm.row_squares(own) if own else torch.zeros(0, dtype=torch.float64)
    return reproducible_norm.pieces(sums)


def squared_norm(model: ParallelModel, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]],
                 norms: Mapping[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
    """Return this rank's share of the squared norm of the whole gradient. On every mesh the shares add up to it.

    Args:
        gradients: pairs of a parameter and the local part of its gradient.
        norms: of the gradient of each parameter, if they are known; None: compute them.

    Returns:
        fp64 scalar: each tensor's sum of squares, computed in its own precision and divided by the number of ranks that
        hold the tensor; added over tensors in fp64.
    """
    alike: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for parameter, gradient in gradients:
        if gradient.numel():
            alike.setdefault(model.replicas(parameter), []).append((parameter, gradient))
    shares: list[torch.Tensor] = []
    for replicas, held in alike.items():
        known = (torch._foreach_norm([gradient for _, gradient in held]) if norms is None
                 else [norms[parameter] for parameter, _ in held])
        shares.append(torch.stack([norm.double() for norm in known]).square().sum() / replicas)
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)
