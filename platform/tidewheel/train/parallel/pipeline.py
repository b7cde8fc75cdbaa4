"""Pipeline parallelism: the decoder cut into stages, run by the schedules of torch.distributed.pipelining.

Only the residual stream travels between ranks. All ranks of a pipeline read the same rows, so positions, segments and
targets are at hand wherever a stage needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from tidewheel.models.decoder import Decoder
from tidewheel.train import objectives
from tidewheel.train.objective import Objective
from tidewheel.train.parallel.data_parallel import Alone, local
from tidewheel.train.parallel.stages import ScheduleName, Stage

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch

TORCH_NAMES: dict[ScheduleName, str] = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble", "zbv_zero_bubble": "ZBVZeroBubble"}

BORROWED = "output.weight"
"""Name, in the last stage, of its copy of a tied embedding; see `TiedEmbedding`."""


def cut(model: Decoder, stage: Stage) -> Decoder:
    """Take from a whole decoder (on the meta device) what `stage` does not hold; what is left keeps its names.

    With tied embeddings the last stage gets an output matrix of its own, see `TiedEmbedding`.
    """
    for index in range(model.config.num_layers):
        if index not in stage.blocks:
            delattr(model.blocks, str(index))  # unlike `del blocks[index]`, which gives the others new names
    if not stage.last:
        model.norm = model.output = None
    elif model.output is None:
        model.output = nn.Linear(model.config.dim, model.vocabulary_size, bias=False, device="meta",
                                 dtype=model.weight.dtype)
    if not stage.first:
        model.embedding = None
    return model


class Pipeline:
    """This rank's stages, and the passes through all of them. All ranks of the pipeline call each method together.

    Args:
        parts: this rank's pieces of the decoder, see `cut`, in the order of their stages.
        stages: the stages of the whole pipeline.
        group: the ranks of this pipeline, in order.
        sequence_parts: ranks over which sequence parallelism spreads the positions of the residual stream.
        dtype: of the residual stream: that of the embedding, to which the blocks' outputs are added.
    """

    def __init__(self, parts: Sequence[Decoder], stages: Sequence[Stage], schedule: ScheduleName, *,
                 group: dist.ProcessGroup, device: torch.device, sequence_parts: int = 1,
                 dtype: torch.dtype = torch.float32, objective: Objective | None = None) -> None:
        self._objective = objective or objectives.KIND.build(objectives.DEFAULT)
        self._width = (1 + len(self._objective.METRICS),) if self._objective.METRICS else ()
        self._group, self._rank, self._device = group, dist.get_rank(group), device
        self._stages, self._schedule = stages, schedule
        self._mine = [(stage, part) for stage, part in zip([s for s in stages if s.rank == self._rank], parts)]
        self._sequence_parts, self._dtype = sequence_parts, dtype
        self._vocabulary_size = parts[0].vocabulary_size
        self._prepared: dict[tuple[int, ...], _Prepared] = {}
        self._sending: dict[int, tuple[Any, torch.Tensor]] = {}
        self._tied = TiedEmbedding(self._mine, stages, group, device) if parts[0].config.tie_embeddings else None

    @property
    def has_last(self) -> bool:
        """Whether this rank holds the last stage, and so the losses."""
        return self._mine[-1][0].last

    def owns(self, name: str) -> bool:
        """Whether a parameter of one of the parts is the model's, not a copy."""
        return self._tied is None or name != BORROWED

    def refresh(self) -> None:
        """Parameters have other values: the last stage's copy of a tied embedding gets them too."""
        if self._tied is not None:
            self._tied.lend()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], context: AbstractContextManager[None],
                         scale: torch.Tensor | float | None = None, data: Sequence[Alone] = ()) -> torch.Tensor:
        """Forward and backward passes of one step in the order of the schedule. Call `finish` after it.

        Args:
            micro_batches: as many as the schedule takes, all of one shape.
            context: entered around each forward pass.
            scale: the backward pass is of loss x scale.
            data: the data parallelism of each stage; told of each backward pass that is over.

        Returns:
            [len(micro_batches)] fp32 losses, without `scale`; of an objective with metrics
            [len(micro_batches), 1 + metrics]. Zeros on ranks without the last stage. FSDP2 has summed gradients over
            data ranks.
        """
        plan = self._plan(len(micro_batches), micro_batches[0].tokens)
        plan.loss.begin(scale)
        for number, stage in enumerate(plan.stages):
            stage.begin(micro_batches, context, data[number] if data else None, self._objective)
        plan.schedule.step(target=torch.zeros(len(micro_batches)), return_outputs=False)  # stages have their targets
        for stage in plan.stages:
            stage.begin((), nullcontext())
        if not self.has_last:
            return torch.zeros(len(micro_batches), *self._width, device=self._device)
        return torch.stack(plan.loss.values)

    def finish(self) -> None:
        """Gradients are summed over data ranks: the first stage's embedding gets those of the last stage's copy."""
        if self._tied is not None:
            self._tied.give_back()

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor,
                targets: torch.Tensor | None = None) -> torch.Tensor | None:
        """What the whole decoder returns, on the rank with the last stage; None on the others.

        The others do not wait for it: in several calls in a row each stage works on another one.
        """
        x: torch.Tensor | None = None
        for stage, part in self._mine:
            if not stage.first and self._stages[stage.index - 1].rank != self._rank:
                x = torch.empty(self._shape(tokens), dtype=self._dtype, device=self._device)
                dist.recv(x, group=self._group, group_src=self._stages[stage.index - 1].rank)
            x = part(tokens if stage.first else x, positions, segment_ids, targets if stage.last else None)
            if not stage.last and self._stages[stage.index + 1].rank != self._rank:
                self._send(stage.index, x.contiguous())
        return x if self.has_last else None

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
        """[B, L, V] logits on every rank."""
        last = self.forward(tokens, positions, segment_ids)
        found = torch.empty(*tokens.shape, self._vocabulary_size, device=self._device)
        if last is not None:
            found.copy_(last)  # autocast makes them bf16
        dist.broadcast(found, group=self._group, group_src=self._stages[-1].rank)
        return found

    def _send(self, index: int, x: torch.Tensor) -> None:
        if index in self._sending:
            self._sending.pop(index)[0].wait()
        work = dist.isend(x, group=self._group, group_dst=self._stages[index + 1].rank)
        self._sending[index] = (work, x)  # the tensor must live until it is sent

    def _plan(self, number: int, tokens: torch.Tensor) -> _Prepared:
        """The schedule for `number` micro-batches of the shape of `tokens`; kept, with its receive buffers."""
        key = (number, *tokens.shape)
        if key not in self._prepared:
            loss = _Loss()
            ends = [self._ends(stage, tokens) for stage, _ in self._mine]
            stages = [_RowStage(part, stage.index, stage.count, self._device, input_args=given, output_args=returned,
                                group=self._group) for (stage, part), (given, returned) in zip(self._mine, ends)]
            kind = get_schedule_class(TORCH_NAMES[self._schedule])
            held = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
            plan = _Prepared(kind(held, number, loss_fn=loss, scale_grads=False), stages, loss)
            self._prepared = {key: plan}  # a batch-size ramp never comes back to fewer
        return self._prepared[key]

    def _shape(self, tokens: torch.Tensor) -> tuple[int, ...]:
        """Of this rank's part of the residual stream for `tokens` [B, L]."""
        rows, length = tokens.shape
        return rows, length // self._sequence_parts, self._mine[0][1].config.dim

    def _ends(self, stage: Stage, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a stage is given and returns, on the meta device: torch need not run the model to find out."""
        stream = torch.empty(self._shape(tokens), dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty(self._width, device="meta", requires_grad=True)
        return torch.empty_like(tokens, device="meta") if stage.first else stream, loss if stage.last else stream


class _RowStage(PipelineStage):
    """A stage that takes the rows of a micro-batch from this rank's memory, not through the pipe."""

    _micro_batches: Sequence[MicroBatch] = ()
    _context: AbstractContextManager[None] = nullcontext()
    _data: Alone | None = None
    _objective: Objective | None = None

    def begin(self, micro_batches: Sequence[MicroBatch], context: AbstractContextManager[None],
              data: Alone | None = None, objective: Objective | None = None) -> None:
        """The rows of the next run of the schedule, what each forward pass runs in, who is told of each backward pass,
        and what the last stage computes."""
        self._micro_batches, self._context, self._data = micro_batches, context, data
        self._objective = objective

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self._data is not None:  # reproducible mode refuses schedules whose gradients come in two passes
            self._data.done(bwd_chunk_id, len(self._micro_batches))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._micro = self._micro_batches[fwd_chunk_id]
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        micro = self._micro
        objective = self._objective.bound(micro) if self.is_last and self._objective is not None else None
        with self._context:
            return super().forward_maybe_with_nosync(
                micro.tokens if self.is_first else args[0], micro.positions, micro.segment_ids,
                micro.targets if self.is_last else None, objective)


class _Loss:
    """The loss function of a schedule: the last stage returns the loss already."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self._scale: torch.Tensor | float | None = None

    def begin(self, scale: torch.Tensor | float | None) -> None:
        self.values, self._scale = [], scale

    def __call__(self, sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.values.append(sums.detach())
        loss = sums if sums.ndim == 0 else sums[0].clone()  # a zero-bubble schedule detaches it, as it cannot a view
        return loss if self._scale is None else loss * self._scale


@dataclass
class _Prepared:
    schedule: Any
    stages: list[_RowStage]
    loss: _Loss


@dataclass(frozen=True)
class TiedEmbedding:
    """The embedding matrix, which the first stage lends to the last one as its output matrix.

    It stays one parameter: the copy has no optimizer state and is in no checkpoint. Both ranks hold the same shards of
    it, so that a shard is what travels. ZBV has both stages on one rank.

    Args:
        parts: this rank's stages.
        stages: all stages of the pipeline.
    """

    parts: Sequence[tuple[Stage, Decoder]]
    stages: Sequence[Stage]
    group: dist.ProcessGroup
    device: torch.device

    @torch.no_grad()
    def lend(self) -> None:
        """Give the copy the embedding's values."""
        mine, copy = self._embedding(), self._copy()
        values = self._pass(mine, copy, self.stages[0].rank, self.stages[-1].rank)
        if copy is not None and values is not None:
            local(copy).copy_(values)

    @torch.no_grad()
    def give_back(self) -> None:
        """Add the copy's gradient to the embedding's."""
        mine, copy = self._embedding(), self._copy()
        gradient = self._pass(None if copy is None else copy.grad, None if mine is None else mine.grad,
                              self.stages[-1].rank, self.stages[0].rank)
        if mine is not None and gradient is not None:
            assert mine.grad is not None
            local(mine.grad).add_(gradient.to(mine.device))
        if copy is not None:
            copy.grad = None

    def _pass(self, source: torch.Tensor | None, target: torch.Tensor | None, sender: int,
              receiver: int) -> torch.Tensor | None:
        """The local part of `source` on the receiving rank, where `target` has its shape and type; None elsewhere."""
        rank = dist.get_rank(self.group)
        if sender == receiver:
            return None if source is None else local(source)
        if rank == sender and source is not None:
            dist.send(local(source).to(self.device).contiguous(), group=self.group, group_dst=receiver)
        if rank == receiver and target is not None:
            values = torch.empty(local(target).shape, dtype=target.dtype, device=self.device)
            dist.recv(values, group=self.group, group_src=sender)
            return values
        return None

    def _embedding(self) -> torch.Tensor | None:
        part = self.parts[0][1]
        return None if part.embedding is None else part.embedding.weight

    def _copy(self) -> torch.Tensor | None:
        part = self.parts[-1][1]
        return None if part.output is None else part.output.weight
