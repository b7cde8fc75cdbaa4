"""This rank's part of the model, sharded and compiled."""

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
from torch.distributed.tensor import DTensor

from tidewheel.errors import ConfigError
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Model
from tidewheel.train import fp8, memory, objectives
from tidewheel.train.compile import compile_blocks
from tidewheel.train.config import TrainConfig
from tidewheel.train.micro_batch_share import MicroBatchShare
from tidewheel.train.objective import Objective
from tidewheel.train.parallel import async_tensor, expert, legal, tensor
from tidewheel.train.parallel import context as context_parallel
from tidewheel.train.parallel.context import RowShare
from tidewheel.train.parallel.data_parallel import Replicated, ShardedOptimizer, SingleProcess, blocks, local
from tidewheel.train.parallel.expert_load import ExpertLoad
from tidewheel.train.parallel.fully_shard import FullyShard
from tidewheel.train.parallel.mesh import DIMS, GRADIENTS, Mesh, dimensions
from tidewheel.train.parallel.pipeline import Pipeline, cut
from tidewheel.train.parallel.stages import stages
from tidewheel.train.precision import REDUCED, sharded_precision
from tidewheel.train.reproducible.exchange import Group, OrderedSum
from tidewheel.train.reproducible.gradient_order import GradientOrder
from tidewheel.train.runtime import Runtime

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch

__all__ = ["KEEP_PARAMETERS", "ParallelModel", "build", "local", "parallelize"]

HEAD_WEIGHT = "output.weight"
"""Name of the matrix that an objective's head replaces."""
KEEP_PARAMETERS = 100_000_000
"""Below this number of parameters, `data: auto` is zero2 and `reduce: auto` is step, which communicate least."""


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
        rows: the part of each row that this rank computes; default: all of it.
    """

    def __init__(self, parts: Sequence[nn.Module], data: Sequence[SingleProcess], mesh: Mesh, config: Model,
                 vocabulary_size: int, num_parameters: int, pipeline: Pipeline | None = None,
                 order: GradientOrder | None = None, objective: Objective | None = None,
                 rows: RowShare | None = None) -> None:
        self.pipeline = pipeline
        self.order = order
        self.objective = objective or objectives.KIND.build(objectives.DEFAULT)
        self.share = MicroBatchShare(mesh.data_rank, mesh.data_size) if order is None else order.share
        self._rows = rows
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
            for name, parameter in data.named_parameters():
                if self.pipeline is None or self.pipeline.owns(name):
                    yield name, parameter

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
                         scale: torch.Tensor | float | None = None) -> torch.Tensor:
        """Run the forward and backward passes of a step's micro-batches.

        Afterwards gradients are summed over the micro-batches of all data ranks.

        Args:
            micro_batches: of this data rank, all of one shape.
            context: reusable, entered around each forward pass (autocast).
            scale: factor of the loss in the backward pass.

        Returns:
            The sum of losses of each micro-batch without `scale`, fp32 [len(micro_batches)] on the training device; for
            an objective with metrics [len(micro_batches), 1 + metrics]. It is zero on all but one of the ranks that
            compute the same loss, so the sum over all ranks is the loss.
        """
        micro_batches = [self._share(micro) for micro in micro_batches]
        self.experts.begin(scale)
        if self.pipeline is not None:
            losses = self.pipeline.forward_backward(micro_batches, context, scale, self.data)
        else:
            losses = self._sequentially(micro_batches, context, scale)
        for data in self.data:
            data.finish()
        if self.pipeline is not None:
            self.pipeline.finish()
        return self._reported(losses)

    def _sequentially(self, micro_batches: Sequence[MicroBatch], context: AbstractContextManager[None],
                      scale: torch.Tensor | float | None) -> torch.Tensor:
        (part,), (data,) = self.parts, self.data
        losses = []
        for index, micro in enumerate(micro_batches):
            data.begin(index, len(micro_batches))
            with context:
                sums = part(micro.tokens, micro.positions, micro.segment_ids, micro.targets,
                            self.objective.bound(micro), micro.documents)
            loss = sums if sums.ndim == 0 else sums[0]
            (loss if scale is None else loss * scale).backward()
            data.done(index, len(micro_batches))
            losses.append(sums.detach())
        return torch.stack(losses)

    @torch.no_grad()
    def evaluate(self, micro: MicroBatch, context: AbstractContextManager[None] | None = None) -> torch.Tensor:
        """Return what validation measures on a micro-batch.

        On packed sequences it is the sum of token losses, an fp32 scalar: the cross-entropy for every objective. On
        pairs it is the objective's loss and metrics, fp32 [1 + metrics]. It is zero on all but one of the ranks that
        compute the same values. Call `reshard` after the last micro-batch.
        """
        micro = self._share(micro)
        objective = self.objective.bound(micro) if self.objective.parts > 1 else None
        with context or nullcontext():
            if self.pipeline is None:
                loss = self.parts[0](micro.tokens, micro.positions, micro.segment_ids, micro.targets, objective,
                                     micro.documents)
            else:
                last = self.pipeline.forward(micro.tokens, micro.positions, micro.segment_ids, micro.targets,
                                             micro.documents, objective)
                width = () if objective is None else (1 + len(self.objective.METRICS),)
                loss = torch.zeros(width, device=micro.tokens.device) if last is None else last
        return self._reported(loss)

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

    def reshard(self) -> None:
        """Free the parameters that an evaluation has gathered."""
        for data in self.data:
            data.reshard()


def build(config: TrainConfig, vocabulary_size: int, runtime: Runtime) -> ParallelModel:
    """Build this rank's part of the model with uninitialised parameters. All ranks must call it together.

    Args:
        config: of the run.
        vocabulary_size: rows of the embedding.
        runtime: this rank, the world size and the device.

    Raises:
        ConfigError: the layout does not fit the world size, the model or the device.
    """
    legal.check_world(config, runtime.world_size)
    parallel = config.parallel
    mesh = Mesh.build(parallel, runtime)
    device = torch.device(runtime.device)
    if parallel.async_tensor:
        async_tensor.check(mesh.group("tensor"), device, runtime.node)
    with torch.device("meta"):
        whole = _decoder(config, vocabulary_size)
    if config.parameters == "bf16":
        whole.to(torch.bfloat16)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    order = None
    if config.reproducible:
        order = GradientOrder.of(mesh, config.batch.virtual_ranks, streams=reduces_always(config, mesh, num_parameters))
    windows = tuple(config.model.window(layer) for layer in range(config.model.num_layers))
    rows = RowShare(mesh.coordinate("context"), parallel.context, parallel, windows)
    if parallel.pipeline == 1:
        data = parallelize(whole, config, mesh, device, num_parameters, order)
        return ParallelModel([whole], [data], mesh, config.model, vocabulary_size, num_parameters, order=order,
                             objective=config.objective, rows=rows)
    all_stages = stages(config.model.num_layers, parallel.pipeline, parallel.pipeline_schedule,
                        parallel.stages_per_rank)
    parts = [cut(copy.deepcopy(whole), stage) for stage in all_stages if stage.rank == mesh.coordinate("pipeline")]
    parallelized = [parallelize(part, config, mesh, device, num_parameters, order) for part in parts]
    pipeline = Pipeline(parts, all_stages, parallel.pipeline_schedule, group=mesh.group("pipeline"), device=device,
                        sequence_parts=parallel.tensor, dtype=whole.weight.dtype, objective=config.objective)
    return ParallelModel(parts, parallelized, mesh, config.model, vocabulary_size, num_parameters, pipeline, order,
                         config.objective, rows)


def _decoder(config: TrainConfig, vocabulary_size: int) -> Decoder:
    """Return the decoder, with the objective's head in the place of the output matrix if it has one."""
    head = config.objective.HEAD
    if not head:
        return Decoder(config.model, vocabulary_size, config.objective.token_loss())
    model = config.model.model_copy(update={"tie_embeddings": False})  # the head has weights of its own
    whole = Decoder(model, vocabulary_size, config.objective.token_loss())
    whole.output = nn.Linear(model.dim, head, bias=False)
    return whole


def parallelize(part: Decoder, config: TrainConfig, mesh: Mesh, device: torch.device, num_parameters: int,
                order: GradientOrder | None = None) -> SingleProcess:
    """Apply parallelism, activation checkpointing and compilation to one part of the model, and allocate it.

    Args:
        part: a decoder or a pipeline stage, on the meta device.
        config: of the run.
        mesh: the ranks.
        device: that computes.
        num_parameters: of the whole model.
        order: of reproducible mode.

    Returns:
        The data parallelism of the part.

    Raises:
        ConfigError: `parallel.offload` is set, and nothing is sharded; or the model family's layers cannot be sharded.
    """
    # The order matters, as in torchtitan. Tensor and context parallelism change layers. Activation checkpointing and
    # compilation wrap the result. Data parallelism comes last and sees only parameters.
    parallel = config.parallel
    shards = mesh.shard_mesh() if parallel.fully_sharded else None
    if config.precision == "fp8":
        fp8.convert_linears(part, config.fp8, sharded=shards is not None, tensor=mesh.size("tensor"))
    if (ranks := mesh.of("tensor")) is not None:
        tensor.apply(part, ranks, asynchronous=parallel.async_tensor)
    expert.apply(part, mesh, reproducible=order is not None)
    if (ranks := mesh.of("context")) is not None:
        context_parallel.apply(part, ranks, parallel)
    memory.apply(part, config.memory)
    if config.compile:
        compile_blocks(blocks(part))
    if shards is not None:
        return _fully_sharded(part, config, mesh, shards, device, num_parameters, order)
    if parallel.offload:
        raise ConfigError("parallel.offload needs at least two data-parallel workers to shard over",
                          where="parallel.offload", fix="leave it out, or start more workers")
    part.to_empty(device=device)
    group = mesh.of(*GRADIENTS)
    ordered: dict[str, Any] = {}
    if order is not None:
        replicas = Group.replicas(mesh)
        ordered = {"order": order, "sums": lambda: OrderedSum(order, replicas)}
    if group is None:
        return Replicated(part, None, **ordered) if ordered else SingleProcess(part)
    kind = ShardedOptimizer if parallel.data == "zero1" else Replicated
    return kind(part, group, reduce_dtype=REDUCED[parallel.reduce_dtype], **ordered)


def _fully_sharded(part: Decoder, config: TrainConfig, mesh: Mesh, shards: DeviceMesh, device: torch.device,
                   num_parameters: int, order: GradientOrder | None) -> FullyShard:
    parallel = config.parallel
    ordered: dict[str, Any] = {}
    precision = sharded_precision(config.precision, device, REDUCED[parallel.reduce_dtype])
    if order is not None:
        near = Group.shards(mesh)
        far = Group.copies(mesh) if mesh.size("replicate") > 1 else None
        ordered = {"order": order, "sums": lambda: OrderedSum(order, near, far)}
        inner = mesh.of("shard", "context")
        assert inner is not None
        shards = inner  # `far` sums over replicas
        # a single rank runs without FSDP2, which would round the weights of norms to 16 bits
        precision = dataclasses.replace(precision, param_dtype=None)
    if mesh.expert > 1:
        ordered["experts"] = expert.ShardedExperts.of(mesh, order)
    data = FullyShard(
        part, shards, reshard_after_forward=parallel.data == "zero3" or (
            parallel.data == "auto" and _large(config, num_parameters)),
        reduce_always=reduces_always(config, mesh, num_parameters), offload=parallel.offload, precision=precision,
        **ordered)
    part.to_empty(device="cpu" if parallel.offload else device)
    return data


def _large(config: TrainConfig, num_parameters: int) -> bool:
    # in a pipeline, parameters would be gathered and gradients sharded again for every micro-batch
    return num_parameters > KEEP_PARAMETERS and config.parallel.pipeline == 1


def reduces_always(config: TrainConfig, mesh: Mesh, num_parameters: int) -> bool:
    """Return whether gradients are reduced after every micro-batch, not once per step.

    Args:
        config: of the run.
        mesh: the ranks.
        num_parameters: of the whole model.
    """
    reduce = config.parallel.reduce
    if config.parallel.reduce_dtype == "bf16" and config.parallel.replicate > 1:
        return False  # FSDP2 would add up micro-batches in bf16 before the all-reduce over replicas
    return (config.parallel.fully_sharded and mesh.size("shard", "context") > 1
            and (reduce == "micro_batch" or (reduce == "auto" and _large(config, num_parameters))))
