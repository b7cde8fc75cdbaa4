"""Pipeline parallelism: a decoder split into stages, run by the schedules of torch.distributed.pipelining.

Ranks send each other only the residual stream. All ranks of a pipeline read the same rows, so every stage has the
positions, segments and targets that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from tidewheel.models.decoder import Decoder
from tidewheel.models.documents import Documents
from tidewheel.train import objectives
from tidewheel.train.objective import Bound, Objective
from tidewheel.train.parallel.data_parallel import SingleProcess, local
from tidewheel.train.parallel.stages import ScheduleName, Stage

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch

TORCH_NAMES: dict[ScheduleName, str] = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble", "zbv_zero_bubble": "ZBVZeroBubble"}

BORROWED = "output.weight"
"""Name of the last stage's copy of a tied embedding; see `TiedEmbedding`."""


def cut(model: Decoder, stage: Stage) -> Decoder:
    """Remove from a whole decoder what `stage` does not hold. Remaining modules keep their names.

    With tied embeddings the last stage gets its own output matrix, see `TiedEmbedding`.

    Args:
        model: a whole decoder on the meta device, which is changed.
        stage: of the pipeline.
    """
    for index in range(model.config.num_layers):
        if index not in stage.blocks:
            delattr(model.blocks, str(index))  # unlike `del blocks[index]`, which renames the others
    if not stage.last:
        model.norm = model.output = model.value_head = None
    elif model.output is None:
        model.output = nn.Linear(model.config.dim, model.vocabulary_size, bias=False, device="meta",
                                 dtype=model.weight.dtype)
    if not stage.first:
        model.embedding = None
    return model


class Pipeline:
    """This rank's stages of a pipeline. All ranks of the pipeline must call each method together.

    Args:
        parts: this rank's parts of the decoder, see `cut`, in the order of their stages.
        stages: all stages of the pipeline.
        schedule: order of the passes.
        group: the ranks of this pipeline, in order.
        device: that computes.
        sequence_parts: number of ranks over which sequence parallelism shards the positions of the residual stream.
        dtype: of the residual stream, which is that of the embedding.
        objective: default: next-token cross-entropy.
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
        """Return whether this rank has the last stage, and so the losses."""
        return self._mine[-1][0].last

    def owns(self, name: str) -> bool:
        """Return whether a parameter of a part belongs to the model and is not a copy."""
        return self._tied is None or name != BORROWED

    def refresh(self) -> None:
        """Copy new values of a tied embedding to the last stage."""
        if self._tied is not None:
            self._tied.copy_values()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], context: AbstractContextManager[None],
                         scale: torch.Tensor | float | None = None, data: Sequence[SingleProcess] = ()) -> torch.Tensor:
        """Run the forward and backward passes of one step in the order of the schedule. Call `finish` afterwards.

        Args:
            micro_batches: all of one shape; the schedule must be able to run their number.
            context: entered around each forward pass.
            scale: factor of the loss in the backward pass.
            data: data parallelism of each stage, which is notified of the end of each backward pass.

        Returns:
            The losses without `scale`, fp32 [len(micro_batches)]; for an objective with metrics
            [len(micro_batches), 1 + metrics]. Zeros on ranks without the last stage. FSDP2 has summed gradients over
            data ranks.
        """
        plan = self._plan(len(micro_batches), micro_batches[0].tokens)
        plan.loss.begin(scale)
        for number, stage in enumerate(plan.stages):
            stage.begin(micro_batches, context, data[number] if data else None, self._objective)
        plan.schedule.step(target=torch.zeros(len(micro_batches)), return_outputs=False)  # stages have the targets
        for stage in plan.stages:
            stage.begin((), nullcontext())
        if not self.has_last:
            return torch.zeros(len(micro_batches), *self._width, device=self._device)
        return torch.stack(plan.loss.values)

    def row_losses(self) -> list[torch.Tensor]:
        """Return the losses of rows of each micro-batch of the last step, fp64 [rows]; [] without the last stage."""
        return [losses for plan in self._prepared.values() for stage in plan.stages
                for _, losses in sorted(stage.row_losses.items())]

    def finish(self) -> None:
        """Add the gradient of the last stage's copy to that of a tied embedding, after the sum over data ranks."""
        if self._tied is not None:
            self._tied.return_gradient()

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor,
                targets: torch.Tensor | None = None, documents: Documents | None = None,
                objective: Bound | None = None) -> torch.Tensor | None:
        """Return the output of the whole decoder on the rank with the last stage, None on the others.

        The others do not wait for it, so the stages overlap several calls in a row.

        Args:
            tokens: see `Decoder.forward`, also for the others.
            positions: of the tokens.
            segment_ids: of the tokens.
            targets: None: logits are returned.
            documents: of the tokens.
            objective: computed by the last stage in the place of the cross-entropy.
        """
        x: torch.Tensor | None = None
        for stage, part in self._mine:
            if not stage.first and self._stages[stage.index - 1].rank != self._rank:
                x = torch.empty(self._shape(tokens), dtype=self._dtype, device=self._device)
                dist.recv(x, group=self._group, group_src=self._stages[stage.index - 1].rank)
            x = part(tokens if stage.first else x, positions, segment_ids, targets if stage.last else None,
                     objective if stage.last else None, documents)
            if not stage.last and self._stages[stage.index + 1].rank != self._rank:
                self._send(stage.index, x.contiguous())
        return x if self.has_last else None

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
        """Return logits [B, L, V] on every rank.

        Args:
            tokens: see `Decoder.forward`, also for the others.
            positions: of the tokens.
            segment_ids: of the tokens.
        """
        last = self.forward(tokens, positions, segment_ids)
        logits = torch.empty(*tokens.shape, self._vocabulary_size, device=self._device)
        if last is not None:
            logits.copy_(last)  # bf16 with autocast
        dist.broadcast(logits, group=self._group, group_src=self._stages[-1].rank)
        return logits

    def _send(self, index: int, x: torch.Tensor) -> None:
        if index in self._sending:
            self._sending.pop(index)[0].wait()
        work = dist.isend(x, group=self._group, group_dst=self._stages[index + 1].rank)
        self._sending[index] = (work, x)  # keeps the tensor alive until it is sent

    def _plan(self, count: int, tokens: torch.Tensor) -> _Prepared:
        """Return the schedule for `count` micro-batches of the shape of `tokens`. It is cached with its buffers."""
        key = (count, *tokens.shape)
        if key not in self._prepared:
            loss = _Loss()
            ends = [self._ends(stage, tokens) for stage, _ in self._mine]
            stages = [_RowStage(part, stage.index, stage.count, self._device, input_args=given, output_args=returned,
                                group=self._group) for (stage, part), (given, returned) in zip(self._mine, ends)]
            kind = get_schedule_class(TORCH_NAMES[self._schedule])
            held = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
            plan = _Prepared(kind(held, count, loss_fn=loss, scale_grads=False), stages, loss)
            self._prepared = {key: plan}  # a batch-size ramp never returns to fewer
        return self._prepared[key]

    def _shape(self, tokens: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of this rank's part of the residual stream for `tokens` [B, L]."""
        rows, length = tokens.shape
        return rows, length // self._sequence_parts, self._mine[0][1].config.dim

    def _ends(self, stage: Stage, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a stage's input and output on the meta device, so that torch need not run the model to infer them."""
        stream = torch.empty(self._shape(tokens), dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty(self._width, device="meta", requires_grad=True)
        return torch.empty_like(tokens, device="meta") if stage.first else stream, loss if stage.last else stream


class _RowStage(PipelineStage):
    """A stage that takes the rows of a micro-batch from this rank's memory, not from the stage before."""

    _micro_batches: Sequence[MicroBatch] = ()
    _context: AbstractContextManager[None] = nullcontext()
    _data: SingleProcess | None = None
    _objective: Objective | None = None

    def begin(self, micro_batches: Sequence[MicroBatch], context: AbstractContextManager[None],
              data: SingleProcess | None = None, objective: Objective | None = None) -> None:
        """Set the inputs of the next run of the schedule.

        Args:
            micro_batches: its rows.
            context: entered around each forward pass.
            data: notified of the end of each backward pass.
            objective: computed by the last stage.
        """
        self._micro_batches = micro_batches
        self._context = context
        self._data = data
        self._objective = objective

    @cached_property
    def row_losses(self) -> dict[int, torch.Tensor]:
        """Losses of rows of each micro-batch, by its index, if they are collected."""
        return {}

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self._data is not None:  # reproducible mode refuses schedules with two backward passes
            self._data.done(bwd_chunk_id, len(self._micro_batches))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._micro, self._index = self._micro_batches[fwd_chunk_id], fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        micro = self._micro
        objective = self._objective.bound(micro) if self.is_last and self._objective is not None else None
        with self._context:
            output = super().forward_maybe_with_nosync(
                micro.tokens if self.is_first else args[0], micro.positions, micro.segment_ids,
                micro.targets if self.is_last else None, objective, micro.documents, micro.noise)
        if self.is_last and (rows := cast(Decoder, self.submod).token_loss.rows) is not None:
            self.row_losses[self._index] = rows.take(len(micro.tokens))
        return output


class _Loss:
    """The loss function of a schedule. The last stage has already computed the loss."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self._scale: torch.Tensor | float | None = None

    def begin(self, scale: torch.Tensor | float | None) -> None:
        self.values, self._scale = [], scale

    def __call__(self, sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.values.append(sums.detach())
        loss = sums if sums.ndim == 0 else sums[0].clone()  # a zero-bubble schedule cannot detach a view
        return loss if self._scale is None else loss * self._scale


@dataclass
class _Prepared:
    schedule: Any
    stages: list[_RowStage]
    loss: _Loss


@dataclass(frozen=True)
class TiedEmbedding:
    """An embedding matrix of the first stage, copied to the last stage as its output matrix.

    It remains one parameter: the copy has no optimizer state and is in no checkpoint. Both ranks hold the same shards
    of it, so only shards are sent. ZBV has both stages on one rank.

    Args:
        parts: this rank's stages.
        stages: all stages of the pipeline.
        group: the ranks of the pipeline.
        device: that communicates.
    """

    parts: Sequence[tuple[Stage, Decoder]]
    stages: Sequence[Stage]
    group: dist.ProcessGroup
    device: torch.device

    @torch.no_grad()
    def copy_values(self) -> None:
        """Copy the embedding's values to the last stage."""
        embedding, copy = self._embedding(), self._copy()
        values = self._pass(embedding, copy, self.stages[0].rank, self.stages[-1].rank)
        if copy is not None and values is not None:
            local(copy).copy_(values)

    @torch.no_grad()
    def return_gradient(self) -> None:
        """Add the copy's gradient to the embedding's."""
        embedding, copy = self._embedding(), self._copy()
        if not any(parameter.requires_grad for parameter in (embedding, copy) if parameter is not None):
            return
        gradient = self._pass(None if copy is None else copy.grad, None if embedding is None else embedding.grad,
                              self.stages[-1].rank, self.stages[0].rank)
        if embedding is not None and gradient is not None:
            assert embedding.grad is not None
            local(embedding.grad).add_(gradient.to(embedding.device))
        if copy is not None:
            copy.grad = None

    def _pass(self, source: torch.Tensor | None, target: torch.Tensor | None, sender: int,
              receiver: int) -> torch.Tensor | None:
        """Return the local part of `source` on the receiving rank, None elsewhere.

        `target` has the shape and dtype of the source on the receiving rank.
        """
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
