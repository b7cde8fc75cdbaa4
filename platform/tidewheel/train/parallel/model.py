"""This rank's part of the model: a step's passes over it, its parameters and who holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tidewheel.models.adapter import Adapter
from tidewheel.models.adapting.attach import is_constant
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Model
from tidewheel.models.row_losses import RowLosses
from tidewheel.train import objectives
from tidewheel.train.micro_batch_share import MicroBatchShare
from tidewheel.train.objective import Bound, Objective
from tidewheel.train.parallel.before import Before
from tidewheel.train.parallel.context import RowShare
from tidewheel.train.parallel.data_parallel import SingleProcess
from tidewheel.train.parallel.expert_load import ExpertLoad
from tidewheel.train.parallel.mesh import DIMS, Mesh, dimensions
from tidewheel.train.parallel.pipeline import Pipeline
from tidewheel.train.pass_time import PassTime
from tidewheel.train.reproducible.gradient_order import GradientOrder

if TYPE_CHECKING:
    from tidewheel.train.metrics.waits import Waits
    from tidewheel.train.step import MicroBatch


class ParallelModel:
    """One rank's part of the model. All ranks of the run must call its methods together.

    Args:
        parts: the decoder, or this rank's pipeline stages.
        data: the data parallelism of each part.
        mesh: the ranks.
        config: of the whole model.
        vocabulary_size: rows of the embedding.
        num_parameters: of the whole model.
        pipeline: whose stages the parts are; None: the decoder is whole.
        order: of reproducible mode.
        objective: default: next-token cross-entropy.
        adapter: whose parameters alone are trained; None: all are.
        rows: the part of each row that this rank computes; default: all of it.

    Attributes:
        before: completes each micro-batch before it is computed; None: nothing is missing.
    """

    def __init__(self, parts: Sequence[nn.Module], data: Sequence[SingleProcess], mesh: Mesh, config: Model,
                 vocabulary_size: int, num_parameters: int, pipeline: Pipeline | None = None,
                 order: GradientOrder | None = None, objective: Objective | None = None,
                 rows: RowShare | None = None, adapter: Adapter | None = None) -> None:
        self.pipeline = pipeline
        self.adapter = adapter
        self.order = order
        self.objective = objective or objectives.KIND.build(objectives.DEFAULT)
        self.share = MicroBatchShare(mesh.data_rank, mesh.data_size) if order is None else order.share
        self._rows = rows
        self._row_losses: list[torch.Tensor] = []
        self.before: Before | None = None
        self.pass_time = PassTime()
        self.parts = list(parts)
        self.data = list(data)
        self.mesh = mesh
        self.config = config
        self.vocabulary_size = vocabulary_size
        self.num_parameters = num_parameters
        self.experts = ExpertLoad(self.parts, config, counts=mesh.coordinate("tensor") == 0,
                                  group=mesh.group("context"))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name in a `Decoder`, tensor or DTensor): what the optimizer updates and a checkpoint holds."""
        for data in self.data:
            yield from self._owned(data.named_parameters())

    def frozen_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, tensor or DTensor) of the parameters that are not trained: those of an adapter's base."""
        for data in self.data:
            yield from self._owned(data.frozen_parameters())

    def constants(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are not trained but belong to a checkpoint; see `Adapter.CONSTANT`."""
        return {name: parameter for name, parameter in self.frozen_parameters()
                if self.adapter is not None and is_constant(name, self.adapter)}

    def _owned(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in named if self.pipeline is None or self.pipeline.owns(name))

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in a `Decoder`, whole tensor) of what a checkpoint holds besides parameters."""
        for part in self.parts:
            yield from part.named_buffers()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return `named_parameters` without the names."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def device(self) -> torch.device:
        """Return the device of the sharded parameters, the CPU with offload."""
        return next(self.parts[0].parameters()).device

    def zero_grad(self) -> None:
        """Reset all gradients to None."""
        for data in self.data:
            data.zero_grad()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], context: AbstractContextManager[None],
                         scale: torch.Tensor | float | None = None,
                         bound: Callable[[MicroBatch], Bound | None] | None = None) -> torch.Tensor:
        """Run the forward and backward passes of a step's micro-batches.

        Afterwards gradients are summed over the micro-batches of all data ranks.

        Args:
            micro_batches: of this data rank, all of one shape.
            context: reusable, entered around each forward pass (autocast).
            scale: factor of the loss in the backward pass.
            bound: returns what to minimise in a micro-batch; default: the objective. Not with a pipeline.

        Returns:
            The sum of losses of each micro-batch without `scale`, fp32 [len(micro_batches)] on the training device; for
            an objective with metrics [len(micro_batches), 1 + metrics]. It is zero on all but one of the ranks that
            compute the same loss, so the sum over all ranks is the loss.
        """
        micro_batches = [self._share(micro) for micro in micro_batches]
        self.experts.begin(scale)
        if self.before is not None:
            self.before.begin(micro_batches, context, whole=True)
        if self.pipeline is not None:
            micro_batches = [self._completed(micro, context) for micro in micro_batches]
            losses = self.pipeline.forward_backward(micro_batches, context, scale, self.data)
        else:
            losses = self._sequentially(micro_batches, context, scale, bound)
        for data in self.data:
            data.finish()
        if self.pipeline is not None:
            self.pipeline.finish()
        if self.before is not None:
            self.before.finish()
        return self._reported(losses)

    def take_share(self, virtual_ranks: Sequence[int]) -> None:
        """Give each data rank another number of virtual ranks, from the next step on. All ranks call it together.

        Args:
            virtual_ranks: of each data rank, see `MicroBatchShare`.
        """
        self.share = replace(self.share, virtual_ranks=tuple(virtual_ranks))
        if self.order is not None:
            self.order.share = self.share

    @contextmanager
    def standing_in(self, shift: int) -> Iterator[MicroBatchShare]:
        """Let each data rank compute the micro-batches of the one `shift` ranks after it during the block.

        Reproducible mode's sums then have the same bits as without. All ranks call it together.

        Yields:
            the micro-batches of this data rank.
        """
        order, own = self.order, self.share
        assert order is not None, "only reproducible mode has an order"
        order.shift = shift
        self.share = order.share_of(order.share.rank)
        try:
            yield self.share
        finally:
            order.shift, self.share = 0, own

    def collect_row_losses(self) -> None:
        """Collect the losses of rows in the passes from now on, for `row_losses`."""
        for part in self.parts:
            if getattr(part, "norm", None) is not None:  # the decoder, or the last stage of a pipeline
                cast(Decoder, part).token_loss.rows = RowLosses()

    def row_losses(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Return the losses of each row in the last `forward_backward`, in nats, fp64 [micro-batches, rows].

        They are zero on all but one of the ranks that compute the same loss, and with context parallelism each rank
        has its share of them.

        Args:
            micro_batches: those of the passes.
        """
        losses = self._row_losses if self.pipeline is None else self.pipeline.row_losses()
        if not losses:  # not the last stage of a pipeline
            shape = len(micro_batches), micro_batches[0].tokens.shape[0]
            return torch.zeros(shape, dtype=torch.float64, device=micro_batches[0].tokens.device)
        return self._reported(torch.stack(losses))

    def _sequentially(self, micro_batches: Sequence[MicroBatch], context: AbstractContextManager[None],
                      scale: torch.Tensor | float | None,
                      bound: Callable[[MicroBatch], Bound | None] | None) -> torch.Tensor:
        (part,), (data,) = self.parts, self.data
        losses = []
        self._row_losses.clear()
        self.pass_time.begin()
        for index, given in enumerate(micro_batches):
            micro = self._completed(given, context)
            data.begin(index, len(micro_batches))
            with context:
                sums = part(micro.tokens, micro.positions, micro.segment_ids, micro.targets,
                            (bound or self.objective.bound)(micro), micro.documents, micro.noise)
            if bound is None and (rows := cast(Decoder, part).token_loss.rows) is not None:
                self._row_losses.append(rows.take(len(micro.tokens)))
            loss = sums if sums.ndim == 0 else sums[0]
            (loss if scale is None else loss * scale).backward()
            data.done(index, len(micro_batches))
            losses.append(sums.detach())
        self.pass_time.end(len(micro_batches))
        return torch.stack(losses)

    @torch.no_grad()
    def evaluate(self, micro: MicroBatch, context: AbstractContextManager[None] | None = None) -> torch.Tensor:
        """Return what validation measures on a micro-batch.

        On packed sequences it is the sum of token losses, an fp32 scalar: the cross-entropy for every objective. On
        pairs it is the objective's loss and metrics, fp32 [1 + metrics]. It is zero on all but one of the ranks that
        compute the same values. Call `reshard` after the last micro-batch.
        """
        micro = self._share(micro)
        objective, context = None, context or nullcontext()
        if self.objective.parts > 1:
            if self.before is not None:
                self.before.begin([micro], context, whole=False)
            objective = self.objective.bound(self._completed(micro, context))
        last = self.forward(micro, context, objective)
        width = () if objective is None else (1 + len(self.objective.METRICS),)
        return self._reported(torch.zeros(width, device=micro.tokens.device) if last is None else last)

    @torch.no_grad()
    def forward(self, micro: MicroBatch, context: AbstractContextManager[None],
                objective: Bound | None = None) -> torch.Tensor | None:
        """Return what an objective computes from a micro-batch's outputs, without a gradient.

        With a pipeline it is None on ranks without the last stage. Call `reshard` after the last micro-batch.

        Args:
            micro: this rank's part of the rows.
            context: entered around the forward pass.
            objective: default: the decoder's cross-entropy.
        """
        inputs = (micro.tokens, micro.positions, micro.segment_ids, micro.targets)
        with context:
            if self.pipeline is None:
                result: torch.Tensor = self.parts[0](*inputs, objective, micro.documents)
                return result
            return self.pipeline.forward(*inputs, micro.documents, objective)

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
        """Return logits [B, L, V] on every rank. Call `reshard` after the last.

        Args:
            tokens: see `Decoder.forward`, also for the others.
            positions: of the tokens.
            segment_ids: of the tokens.
        """
        length = tokens.shape[1]
        padding = (0, -length % self.mesh.size("tensor"))  # sequence parallelism shards positions evenly
        tokens, positions = F.pad(tokens, padding), F.pad(positions, padding)
        segment_ids = F.pad(segment_ids, padding, value=-1)
        model = self.parts[0] if self.pipeline is None else self.pipeline.logits
        return model(tokens, positions, segment_ids)[:, :length]

    def _completed(self, micro: MicroBatch, context: AbstractContextManager[None]) -> MicroBatch:
        """Return a micro-batch with what the objective needs beside it."""
        return micro if self.before is None else self.before.of(micro, context)

    def _share(self, micro: MicroBatch) -> MicroBatch:
        """Return the part of a micro-batch that this rank computes."""
        return micro if self._rows is None else self._rows.of(micro)

    def _reported(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the loss on the first tensor-parallel rank, zero on the others, which have the same loss."""
        return losses if self.mesh.coordinate("tensor") == 0 else torch.zeros_like(losses)

    def replicas(self, parameter: torch.Tensor) -> int:
        """Return the number of ranks that hold the same part of `parameter` as this one, itself included."""
        holders = self.mesh.world_size // self.mesh.size("pipeline")
        if isinstance(parameter, DTensor):
            for dim, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    holders //= parameter.device_mesh.size(dim)
        return holders

    def first_holder(self, parameter: torch.Tensor) -> bool:
        """Return whether this is the first of the ranks that hold the same part of `parameter`."""
        sharded: set[str] = set()
        if isinstance(parameter, DTensor):
            for index, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    sharded |= dimensions(parameter.device_mesh, index)
        return self.mesh.coordinate(*(name for name in DIMS if name != "pipeline" and name not in sharded)) == 0

    def refresh(self) -> None:
        """Make new values of `named_parameters` visible to the forward pass."""
        for data in self.data:
            data.refresh()
        if self.pipeline is not None:
            self.pipeline.refresh()

    def measure(self, waits: Waits) -> None:
        """Measure the waits for sums of gradients and for gathered parameters."""
        for data in self.data:
            data.measure(waits)

    def keep_unsent(self, skip: torch.Tensor | None) -> None:
        """Keep what compression has not sent for the next step, unless this step's update is withheld.

        Args:
            skip: scalar on the device; not zero: withheld. None: it never is.
        """
        for data in self.data:
            if data.coded is not None:
                data.coded.keep(skip)

    def compression_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint that compression keeps; {} without compression."""
        return next((data.coded.state() for data in self.data if data.coded is not None), {})

    def gradient_bytes(self) -> int | None:
        """Return the bytes of gradients that this rank has sent since the last call; None if FSDP2 sends them."""
        if any(data.traffic is None for data in self.data):
            return None
        return sum(data.traffic.take() for data in self.data if data.traffic is not None)

    def reshard(self) -> None:
        """Free the parameters that an evaluation has gathered."""
        for data in self.data:
            data.reshard()
