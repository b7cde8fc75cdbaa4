"""Build this rank's part of the model, sharded and compiled."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tidewheel.errors import ConfigError
from tidewheel.models.adapting import attach
from tidewheel.models.decoder import Decoder
from tidewheel.models.own_module import OwnModule
from tidewheel.models.wrapped import Wrapped
from tidewheel.train import fp8, memory
from tidewheel.train.collectives import Collectives
from tidewheel.train.compile import compile_blocks
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import async_tensor, expert, legal, tensor
from tidewheel.train.parallel import context as context_parallel
from tidewheel.train.parallel.base_reference import BaseReference
from tidewheel.train.parallel.coded import Coded
from tidewheel.train.parallel.context import RowShare
from tidewheel.train.parallel.data_parallel import Replicated, ShardedOptimizer, SingleProcess, blocks
from tidewheel.train.parallel.first_look import FirstLook
from tidewheel.train.parallel.fully_shard import FullyShard
from tidewheel.train.parallel.mesh import GRADIENTS, Mesh
from tidewheel.train.parallel.model import ParallelModel
from tidewheel.train.parallel.pipeline import Pipeline, cut
from tidewheel.train.parallel.stages import stages
from tidewheel.train.parallel.traffic import Traffic
from tidewheel.train.precision import REDUCED, sharded_precision
from tidewheel.train.reproducible.exchange import Group, OrderedSum
from tidewheel.train.reproducible.gradient_order import GradientOrder
from tidewheel.train.runtime import Runtime

HEAD_WEIGHT = "output.weight"
"""Name of the matrix that an objective's head replaces."""
KEEP_PARAMETERS = 100_000_000
"""Below this number of parameters, `data: auto` is zero2 and `reduce: auto` is step, which communicate least."""


def build(config: TrainConfig, vocabulary_size: int, runtime: Runtime, mesh: Mesh | None = None) -> ParallelModel:
    """Build this rank's part of the model with uninitialised parameters. All ranks must call it together.

    Args:
        config: of the run.
        vocabulary_size: rows of the embedding.
        runtime: this rank, the world size and the device.
        mesh: build a frozen model beside the one that this mesh was built for.

    Raises:
        ConfigError: the layout does not fit the world size, the model or the device.
    """
    legal.check_world(config, runtime.world_size)
    parallel = config.parallel
    frozen = mesh is not None
    mesh = mesh or Mesh.build(parallel, runtime)
    device = torch.device(runtime.device)
    if parallel.async_tensor:
        async_tensor.check(mesh.group("tensor"), device, runtime.node)
    with torch.device("cpu" if isinstance(config.model, OwnModule) else "meta"):
        whole = decoder_of(config, vocabulary_size)
    if config.parameters == "bf16":
        whole.to(torch.bfloat16)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    if config.adapter is not None:
        attach.check(whole, config.adapter)
    order = None
    if config.reproducible and not frozen:
        order = GradientOrder.of(mesh, config.batch.virtual_ranks, streams=reduces_always(config, mesh, num_parameters))
    windows = tuple(config.model.window(layer) for layer in range(config.model.num_layers))
    rows = RowShare(mesh.coordinate("context"), parallel.context, parallel, windows)
    if parallel.pipeline == 1:
        data = parallelize(whole, config, mesh, device, num_parameters, order, frozen=frozen)
        return _complete(config, runtime, ParallelModel(
            [whole], [data], mesh, config.model, vocabulary_size, num_parameters, order=order,
            objective=config.objective, rows=rows, adapter=config.adapter))
    all_stages = stages(config.model.num_layers, parallel.pipeline, parallel.pipeline_schedule,
                        parallel.stages_per_rank)
    parts = [cut(copy.deepcopy(whole), stage) for stage in all_stages if stage.rank == mesh.coordinate("pipeline")]
    parallelized = [parallelize(part, config, mesh, device, num_parameters, order, frozen=frozen) for part in parts]
    if not frozen and not all(data.named_parameters() for data in parallelized):
        raise ConfigError("a stage of the pipeline has no part of the adapter, so no gradient would pass it",
                          where="adapter.targets", fix="choose targets in every layer, or parallel.pipeline: 1")
    pipeline = Pipeline(parts, all_stages, parallel.pipeline_schedule, group=mesh.group("pipeline"), device=device,
                        sequence_parts=parallel.tensor, dtype=whole.weight.dtype, objective=config.objective)
    return _complete(config, runtime, ParallelModel(
        parts, parallelized, mesh, config.model, vocabulary_size, num_parameters, pipeline, order, config.objective,
        rows, config.adapter))


def _complete(config: TrainConfig, runtime: Runtime, model: ParallelModel) -> ParallelModel:
    """Give a model the passes before those with gradients that its objective needs."""
    if config.base_is_reference:  # of the adapter; the data have no other
        model.before = BaseReference(model, config.objective)
    if config.objective.looks_first:
        model.before = FirstLook(model, config.objective, Collectives(runtime), model.before)
    return model


def check_adapter(config: TrainConfig, vocabulary_size: int) -> None:
    """Check that each target of a run's adapter is there. It allocates no parameter.

    Args:
        config: of the run.
        vocabulary_size: rows of the embedding.

    Raises:
        ConfigError: a pattern matches no module; the nearest names are given.
    """
    if config.adapter is not None:
        with torch.device("meta"):
            attach.check(decoder_of(config, vocabulary_size), config.adapter)


def decoder_of(config: TrainConfig, vocabulary_size: int) -> Decoder:
    """Return the decoder of a run, with the objective's head in the place of the output matrix or beside it.

    A module of the user's own takes its place, with its initial values.

    Args:
        config: of the run.
        vocabulary_size: rows of the embedding.
    """
    if isinstance(config.model, OwnModule):
        return cast(Decoder, Wrapped(config.model, vocabulary_size, config.objective.token_loss(), config.seed))
    head = config.objective.HEAD
    if not head:
        decoder = Decoder(config.model, vocabulary_size, config.objective.token_loss())
        if config.objective.VALUES:
            decoder.add_value_head()
        return decoder
    model = config.model.model_copy(update={"tie_embeddings": False})  # the head has weights of its own
    whole = Decoder(model, vocabulary_size, config.objective.token_loss())
    whole.output = nn.Linear(model.dim, head, bias=False)
    return whole


def parallelize(part: Decoder, config: TrainConfig, mesh: Mesh, device: torch.device, num_parameters: int,
                order: GradientOrder | None = None, *, frozen: bool = False) -> SingleProcess:
    """Apply parallelism, activation checkpointing and compilation to one part of the model, and allocate it.

    Args:
        part: a decoder or a pipeline stage, on the meta device.
        config: of the run.
        mesh: the ranks.
        device: that computes.
        num_parameters: of the whole model.
        order: of reproducible mode.
        frozen: no parameter is trained, so none has a gradient to reduce.

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
    expert.apply(part, mesh, reproducible=config.reproducible)
    if (ranks := mesh.of("context")) is not None:
        context_parallel.apply(part, ranks, parallel)
    if frozen:
        part.requires_grad_(False)
    if config.adapter is not None:
        attach.attach(part, config.adapter)
        if config.objective.HEAD and part.output is not None:
            part.output.weight.requires_grad_(True)  # a new head is trained in full, and saved with the adapter
    memory.apply(part, config.memory)
    if config.compile:
        compile_blocks(blocks(part))
    memory.offload_inputs(part, config.memory, device)
    if isinstance(part, Wrapped):  # it has values already; `to_empty` would also untie what layers share
        part.to(device)
    if shards is not None:
        return _fully_sharded(part, config, mesh, shards, device, num_parameters, order)
    if parallel.offload:
        raise ConfigError("parallel.offload with a pipeline or with replicas needs at least two workers that shard "
                          "the parameters", where="parallel.offload", fix="leave it out, or start more workers")
    if not isinstance(part, Wrapped):
        part.to_empty(device=device)
    if frozen:
        return SingleProcess(part)
    return _replicated(part, config, mesh, order)


def _replicated(part: Decoder, config: TrainConfig, mesh: Mesh, order: GradientOrder | None) -> SingleProcess:
    parallel, compression, traffic = config.parallel, config.compression, Traffic()
    group = mesh.of(*GRADIENTS)
    options: dict[str, Any] = {"bucket_bytes": parallel.bucket_bytes, "traffic": traffic}
    if order is not None:
        replicas = dataclasses.replace(Group.replicas(mesh), traffic=traffic)
        options |= {"order": order, "sums": lambda: OrderedSum(order, replicas)}
    if compression is not None:
        options["coded"] = partial(Coded, compression, mesh=group, seed=config.seed, traffic=traffic, order=order)
    if group is None:
        return SingleProcess(part) if order is None and compression is None else Replicated(part, None, **options)
    kind = ShardedOptimizer if parallel.data == "zero1" else Replicated
    return kind(part, group, reduce_dtype=REDUCED[parallel.reduce_dtype], **options)


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
        shards = inner if inner is not None else shards  # `far` sums over replicas
    if config.reproducible or shards.size() == 1:
        # a single rank runs without FSDP2, which would round the weights of norms to 16 bits
        precision = dataclasses.replace(precision, param_dtype=None)
    if config.adapter is not None and config.adapter.base != "plain":
        precision = dataclasses.replace(precision, param_dtype=None)  # codes are gathered as they are
    if mesh.expert > 1:
        ordered["experts"] = expert.ShardedExperts.of(mesh, order)
    data = FullyShard(
        part, shards, reshard_after_forward=parallel.data == "zero3" or (
            parallel.data == "auto" and _large(config, num_parameters)),
        reduce_always=reduces_always(config, mesh, num_parameters), prefetch=parallel.prefetch,
        offload=parallel.offload, precision=precision,
        **ordered)
    if not isinstance(part, Wrapped):
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
    if config.parallel.reduce_dtype == "bf16" and config.parallel.has_copies:
        return False  # FSDP2 would add up micro-batches in bf16 before the all-reduce over replicas
    sharded = mesh.size("shard", "context") > 1 or config.parallel.offload
    return (config.parallel.fully_sharded and sharded
            and (reduce == "micro_batch" or (reduce == "auto" and _large(config, num_parameters))))
