"""The model on this rank: cut, compiled and sharded as configured, with initial weights that know no world size."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tidewheel.errors import ConfigError
from tidewheel.models.decoder import Decoder, init_parameter
from tidewheel.models.family import Model
from tidewheel.train import memory, objectives
from tidewheel.train.compile import compile_blocks
from tidewheel.train.config import TrainConfig
from tidewheel.train.micro_batch_share import MicroBatchShare
from tidewheel.train.objective import Objective
from tidewheel.train.parallel import context as context_parallel
from tidewheel.train.parallel import legal, tensor
from tidewheel.train.parallel.data_parallel import Alone, FullyShard, Replicated, ShardedOptimizer, blocks, local
from tidewheel.train.parallel.mesh import DIMS, GRADIENTS, Mesh, dimensions
from tidewheel.train.parallel.pipeline import Pipeline, cut
from tidewheel.train.parallel.stages import stages
from tidewheel.train.precision import convert_linears, sharded_precision
from tidewheel.train.reproducible.exchange import Group, OrderedSum
from tidewheel.train.reproducible.gradient_order import GradientOrder
from tidewheel.train.runtime import Runtime

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch

__all__ = ["KEEP_PARAMETERS", "ParallelModel", "build", "init_weights", "local", "spread"]

KEEP_PARAMETERS = 100_000_000
"""For a smaller model `data: auto` is zero2 and `reduce: auto` is step: least communication, and memory to spare."""


class ParallelModel:
    """One rank's share of the model; every rank of the run has one and all call its methods together.

    Args:
        parts: this rank's decoder, or its pipeline stages' pieces of it.
        data: the data parallelism of each part.
        mesh: the ranks.
        config: of the whole model.
        vocabulary_size: rows of the embedding.
        num_parameters: of the whole model.
        pipeline: of which the parts are stages.
        order: reproducible mode.
        objective: what is minimised; default: the built-in default.
    """

    def __init__(self, parts: Sequence[nn.Module], data: Sequence[Alone], mesh: Mesh, config: Model,
                 vocabulary_size: int, num_parameters: int, pipeline: Pipeline | None = None,
                 order: GradientOrder | None = None, objective: Objective | None = None) -> None:
        self.pipeline, self.order = pipeline, order
        self.objective = objective or objectives.KIND.build(objectives.DEFAULT)
        self.share = MicroBatchShare(mesh.data_rank, mesh.data_size) if order is None else order.share
        self.parts, self.data, self.mesh = list(parts), list(data), mesh
        self.config, self.vocabulary_size, self.num_parameters = config, vocabulary_size, num_parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer updates and a checkpoint holds: tensors or DTensors, under their names in a `Decoder`."""
        for data in self.data:
            for name, parameter in data.named_parameters():
                if self.pipeline is None or self.pipeline.owns(name):
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """`named_parameters` without the names."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def device(self) -> torch.device:
        """Where the sharded parameters are; with offload that is the host."""
        return next(self.parts[0].parameters()).device

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for data in self.data:
            data.zero_grad()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], context: AbstractContextManager[None],
                         scale: torch.Tensor | float | None = None) -> torch.Tensor:
        """Forward and backward passes of a step's micro-batches.

        Args:
            micro_batches: this data rank's, of one shape.
            context: entered around each forward pass; reusable (autocast).
            scale: the backward pass is of loss x scale.

        Returns:
            [len(micro_batches)] fp32 on the training device: the SUM of the losses of each, unscaled; of an objective
            with metrics [len(micro_batches), 1 + metrics]. Zero on ranks that must not report; the sum over all ranks
            is the loss. After it gradients are the SUM over the micro-batches of all data ranks.
        """
        micro_batches = [self._share(micro) for micro in micro_batches]
        if self.pipeline is not None:
            losses = self.pipeline.forward_backward(micro_batches, context, scale, self.data)
        else:
            losses = self._one_after_the_other(micro_batches, context, scale)
        for data in self.data:
            data.finish()
        if self.pipeline is not None:
            self.pipeline.finish()
        return self._reported(losses)

    def _one_after_the_other(self, micro_batches: Sequence[MicroBatch], context: AbstractContextManager[None],
                             scale: torch.Tensor | float | None) -> torch.Tensor:
        (part,), (data,), losses = self.parts, self.data, []
        for number, micro in enumerate(micro_batches):
            data.begin(number, len(micro_batches))
            with context:
                sums = part(micro.tokens, micro.positions, micro.segment_ids, micro.targets,
                            self.objective.bound(micro))
            loss = sums if sums.ndim == 0 else sums[0]
            (loss if scale is None else loss * scale).backward()
            data.done(number, len(micro_batches))
            losses.append(sums.detach())
        return torch.stack(losses)

    @torch.no_grad()
    def evaluate(self, micro: MicroBatch, context: AbstractContextManager[None] | None = None) -> torch.Tensor:
        """Return the SUM of token losses, the cross-entropy whatever the objective, fp32 scalar; zero on ranks that
        must not report. Call `reshard` after the last.
        """
        micro = self._share(micro)
        with context or nullcontext():
            if self.pipeline is None:
                loss = self.parts[0](micro.tokens, micro.positions, micro.segment_ids, micro.targets)
            else:
                last = self.pipeline.forward(micro.tokens, micro.positions, micro.segment_ids, micro.targets)
                loss = torch.zeros((), device=micro.tokens.device) if last is None else last
        return self._reported(loss)

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
        """[B, L, V] logits on every rank, see `Decoder.forward`; call `reshard` after the last."""
        length = tokens.shape[1]
        padding = (0, -length % self.mesh.size("tensor"))  # sequence parallelism spreads positions evenly
        tokens, positions = F.pad(tokens, padding), F.pad(positions, padding)
        segment_ids = F.pad(segment_ids, padding, value=-1)
        model = self.parts[0] if self.pipeline is None else self.pipeline.logits
        return model(tokens, positions, segment_ids)[:, :length]

    def _share(self, micro: MicroBatch) -> MicroBatch:
        """The positions of a micro-batch that this rank computes."""
        return context_parallel.share(micro, self.mesh.coordinate("context"), self.mesh.size("context"))

    def _reported(self, losses: torch.Tensor) -> torch.Tensor:
        """Every tensor-parallel rank has the loss: the first one tells it."""
        return losses if self.mesh.coordinate("tensor") == 0 else torch.zeros_like(losses)

    def replicas(self, parameter: torch.Tensor) -> int:
        """How many ranks hold the same values as this rank's part of `parameter`, this one included."""
        holders = self.mesh.world_size // self.mesh.size("pipeline")
        if isinstance(parameter, DTensor):
            for dim, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    holders //= parameter.device_mesh.size(dim)
        return holders

    def first_holder(self, parameter: torch.Tensor) -> bool:
        """Whether this rank is the first of the `replicas` of its part of `parameter`."""
        cut: set[str] = set()
        if isinstance(parameter, DTensor):
            for number, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    cut |= dimensions(parameter.device_mesh, number)
        return self.mesh.coordinate(*(name for name in DIMS if name != "pipeline" and name not in cut)) == 0

    def refresh(self) -> None:
        """The values of `named_parameters` were changed: let the forward pass see it."""
        for data in self.data:
            data.refresh()
        if self.pipeline is not None:
            self.pipeline.refresh()

    def reshard(self) -> None:
        """Give up what an evaluation has gathered."""
        for data in self.data:
            data.reshard()


def build(config: TrainConfig, vocabulary_size: int, runtime: Runtime) -> ParallelModel:
    """The model on this rank, its values not yet set; all ranks call it together.

    Raises:
        ConfigError: the mesh does not fit the ranks or the model.
    """
    legal.check_world(config, runtime.world_size)
    mesh = Mesh.build(config.parallel, runtime)
    device, wanted = torch.device(runtime.device), config.parallel
    with torch.device("meta"):
        whole = Decoder(config.model, vocabulary_size, config.objective.token_loss())
    if config.parameters == "bf16":
        whole.to(torch.bfloat16)
    number = sum(parameter.numel() for parameter in whole.parameters())
    order = None
    if config.reproducible:
        order = GradientOrder.of(mesh, config.batch.virtual_ranks, streams=reduces_always(config, mesh, number))
    if wanted.pipeline == 1:
        data = spread(whole, config, mesh, device, number, order)
        return ParallelModel([whole], [data], mesh, config.model, vocabulary_size, number, order=order,
                             objective=config.objective)
    cuts = stages(config.model.num_layers, wanted.pipeline, wanted.pipeline_schedule, wanted.stages_per_rank)
    parts = [cut(copy.deepcopy(whole), stage) for stage in cuts if stage.rank == mesh.coordinate("pipeline")]
    spreads = [spread(part, config, mesh, device, number, order) for part in parts]
    pipeline = Pipeline(parts, cuts, wanted.pipeline_schedule, group=mesh.group("pipeline"), device=device,
                        sequence_parts=wanted.tensor, dtype=whole.weight.dtype, objective=config.objective)
    return ParallelModel(parts, spreads, mesh, config.model, vocabulary_size, number, pipeline, order, config.objective)


def spread(part: Decoder, config: TrainConfig, mesh: Mesh, device: torch.device, num_parameters: int,
           order: GradientOrder | None = None) -> Alone:
    """Apply what the configuration asks for to one part of the model, from the inside out, and give it memory.

    Args:
        part: a decoder or a pipeline stage of one, on the meta device.
        num_parameters: of the whole model.
        order: reproducible mode.
    """
    # The order matters, as in torchtitan: tensor and context parallelism change layers, activation checkpointing and
    # compilation wrap what they left, data parallelism comes last and sees only parameters.
    parallel = config.parallel
    convert_linears(part, config.precision)
    if (ranks := mesh.of("tensor")) is not None:
        tensor.apply(part, ranks)
    if (ranks := mesh.of("context")) is not None:
        context_parallel.apply(part, ranks, mesh.size("tensor"))
    memory.apply(part, config.memory)
    if config.compile:
        compile_blocks(blocks(part))
    if parallel.fully_sharded and (shards := mesh.shard_mesh()) is not None:
        return _fully_sharded(part, config, mesh, shards, device, num_parameters, order)
    if parallel.offload:
        raise ConfigError("parallel.offload needs at least two data-parallel workers to shard over",
                          where="parallel.offload", mend="leave it out, or start more workers")
    part.to_empty(device=device)
    group = mesh.of(*GRADIENTS)
    ordered: dict[str, Any] = {}
    if order is not None:
        everyone = Group.replicas(mesh)
        ordered = {"order": order, "sums": lambda: OrderedSum(order, everyone)}
    if group is None:
        return Replicated(part, None, **ordered) if ordered else Alone(part)
    return ShardedOptimizer(part, group, **ordered) if parallel.data == "zero1" else Replicated(part, group, **ordered)


def _fully_sharded(part: Decoder, config: TrainConfig, mesh: Mesh, shards: DeviceMesh, device: torch.device,
                   num_parameters: int, order: GradientOrder | None) -> FullyShard:
    parallel = config.parallel
    ordered: dict[str, Any] = {}
    precision = sharded_precision(config.precision, device)
    if order is not None:
        near = Group.shards(mesh)
        far = Group.copies(mesh) if mesh.size("replicate") > 1 else None
        ordered = {"order": order, "sums": lambda: OrderedSum(order, near, far)}
        inner = mesh.of("shard", "context")
        assert inner is not None
        shards = inner  # replicas are `far`'s affair
        # one rank alone has no FSDP2 to round the norms' weights to 16 bits for it
        precision = dataclasses.replace(precision, param_dtype=None)
    data = FullyShard(
        part, shards, reshard_after_forward=parallel.data == "zero3" or (
            parallel.data == "auto" and _large(config, num_parameters)),
        reduce_always=reduces_always(config, mesh, num_parameters), offload=parallel.offload, precision=precision,
        **ordered)
    part.to_empty(device="cpu" if parallel.offload else device)
    return data


def _large(config: TrainConfig, num_parameters: int) -> bool:
    # in a pipeline parameters would be gathered anew, and gradients cut, for every micro-batch
    return num_parameters > KEEP_PARAMETERS and config.parallel.pipeline == 1


def reduces_always(config: TrainConfig, mesh: Mesh, num_parameters: int) -> bool:
    """Whether gradients are reduced after every micro-batch, not once per step."""
    wanted = config.parallel.reduce
    return (config.parallel.fully_sharded and mesh.size("shard", "context") > 1
            and (wanted == "micro_batch" or (wanted == "auto" and _large(config, num_parameters))))


@torch.no_grad()
def init_weights(model: ParallelModel, seed: int) -> None:
    """Set every parameter to its initial value, whole on CPU one at a time, each rank keeping its shard."""
    for name, parameter in model.named_parameters():
        value = init_parameter(name, parameter.shape, model.config, seed)
        if isinstance(parameter, DTensor):
            shard = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements,
                                      src_data_rank=None)  # every rank has the value: nothing to send
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(value)
    model.refresh()
