"""Checks of a layout before any process starts. Each gives the reason and the nearest legal value. No torch, no Ray."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidewheel.errors import ConfigError
from tidewheel.models.adapting.counts import BLOCK, nf4_refusal
from tidewheel.models.family import Model
from tidewheel.models.moe.config import MixtureOfExperts
from tidewheel.parts import name_of
from tidewheel.shards.manifest import PACKED
from tidewheel.train import objective, objectives, outer_config, stage_schedule
from tidewheel.train.optim import overlapped_config
from tidewheel.train.parallel import compressing, own_module
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.parallel.stages import nearest_micro_batches, takes
from tidewheel.train.reproducible import requirements as reproducible

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig


def legal_sizes(virtual_ranks: int, min_workers: int = 1, max_workers: int | None = None, *, unit: int = 1,
                replicate: int = 1, shard: int | None = None, context: int = 1, expert: int = 1) -> tuple[int, ...]:
    """Return the legal numbers of workers, ascending.

    A legal number is `unit` times a data-parallel size that divides `virtual_ranks`. Then every data rank has the same
    number of virtual ranks and so of micro-batches, and the global batch is the same for every number of workers.

    Args:
        virtual_ranks: of the run.
        min_workers: smallest number.
        max_workers: largest number; None: no limit.
        unit: workers of one copy of the model, tensor x pipeline x context.
        replicate: number of copies that HSDP shards; the data-parallel size is a multiple of it.
        shard: data-parallel workers of each copy, in the place of `replicate`; the data-parallel size is a multiple.
        context: workers that share each sequence.
        expert: workers that share the experts; each copy has a multiple of it in shard x context.
    """
    most = virtual_ranks * unit if max_workers is None else min(max_workers, virtual_ranks * unit)
    step = shard or replicate
    data = range(step, most // unit + 1, step)
    return tuple(size * unit for size in data if size * unit >= min_workers and virtual_ranks % size == 0
                 and (shard or size // replicate) * context % expert == 0)


def _legal_sizes(config: TrainConfig, min_workers: int = 1, max_workers: int | None = None) -> tuple[int, ...]:
    """Return `legal_sizes` of the layout of `config`."""
    parallel = config.parallel
    if config.stage_schedule is not None:
        max_workers = parallel.unit  # a stage updates by itself, so it has no copies
    return legal_sizes(config.batch.virtual_ranks, min_workers, max_workers, unit=parallel.unit,
                       replicate=parallel.replicate, shard=parallel.shard, context=parallel.context,
                       expert=parallel.expert)


def sizes(config: TrainConfig) -> tuple[int, ...]:
    """Return the legal numbers of workers of a run, ascending."""
    possible = _legal_sizes(config, config.elastic.min_workers, config.elastic.max_workers)
    return tuple(size for size in possible if schedule(config, size) is None)


def schedule(config: TrainConfig, world_size: int) -> str | None:
    """Return why the pipeline's schedule cannot run each worker's micro-batches, or None."""
    parallel, batch, data = config.parallel, config.batch, world_size // config.parallel.unit
    for size, count in zip(batch.sizes, batch.micro_batches(data)):
        if parallel.pipeline > 1 and not takes(parallel.pipeline_schedule, parallel.pipeline, count):
            near = nearest_micro_batches(parallel.pipeline_schedule, parallel.pipeline, count)
            name = "batch.global_sequences" if size == batch.global_sequences else "batch.ramp"
            return (f"parallel.pipeline_schedule {parallel.pipeline_schedule} cannot run {count} micro-batches on a "
                    f"pipeline of {parallel.pipeline}, which is what {world_size} workers have of {name} {size} in "
                    f"micro_sequences {batch.micro_sequences}; nearest number that it can: {near}")
    return None


def reason_against(config: TrainConfig) -> str | None:
    """Return why a configuration is illegal, or None. `check_data` and `check_world` check what is known later."""
    mesh = {name: getattr(config.parallel, name) for name in objective.DIMENSIONS}
    return (own_module.reason_against(config) or objective.reason_against(config.objective, mesh)
            or _zero_bubble(config) or _kernels(config) or _fp8(config) or _async_tensor(config) or _lengths(config)
            or _adapter(config) or compressing.reason_against(config) or outer_config.reason_against(config)
            or stage_schedule.reason_against(config) or overlapped_config.reason_against(config)
            or _workers(config) or _speed_shares(config) or _curvature(config) or _equal_attention(config)
            or reproducible.reason_against(config)
            or shape(config.parallel, config.model, config.model.vocabulary_size))


def _zero_bubble(config: TrainConfig) -> str | None:
    """Return why the backward pass cannot be split into one for inputs and one for weights, or None."""
    parallel = config.parallel
    if parallel.pipeline == 1 or "zero_bubble" not in parallel.pipeline_schedule:
        return None
    what = f"pipeline_schedule {parallel.pipeline_schedule} computes the gradients of weights in a separate pass"
    if config.compile:
        return f"{what}, which compiled blocks do not support; nearest legal choice: interleaved_1f1b, or compile false"
    if parallel.data == "zero3":
        return f"{what}, but zero3 has freed the weights by then; nearest legal choice: data zero2"
    if config.memory.activation_checkpointing == "selective":
        return (f"{what}, but the tensors that selective activation checkpointing keeps serve only one pass; nearest "
                "legal choice: activation_checkpointing full")
    return None


def _kernels(config: TrainConfig) -> str | None:
    parallel = config.parallel
    if parallel.context > 1 and config.model.attention == "varlen" and parallel.context_method != "all_to_all":
        return (f"model.attention varlen needs whole rows, but with parallel.context {parallel.context} and "
                f"context_method {parallel.context_method} each worker has slices of them; nearest legal choice: "
                "attention flex, or context_method all_to_all")
    return None


def _lengths(config: TrainConfig) -> str | None:
    """Return why rows cannot be padded to the longest of a micro-batch, or None."""
    multiple, parallel = config.batch.pad_to_multiple_of, config.parallel
    if not multiple:
        return None
    unit = parallel.tensor * (2 * parallel.context if parallel.context > 1 else 1)
    if multiple % unit:
        return (f"batch.pad_to_multiple_of {multiple} gives rows whose positions parallel.context {parallel.context} "
                f"and parallel.tensor {parallel.tensor} cannot share; nearest legal choice: "
                f"{max(1, round(multiple / unit)) * unit}")
    if config.precision == "fp16":
        return ("batch.pad_to_multiple_of with precision fp16, whose loss scale depends on the length of rows, which "
                "differs between workers; nearest legal choice: precision bf16, or pad_to_multiple_of 0")
    return None


def _fp8(config: TrainConfig) -> str | None:
    """Return why weights cannot be gathered in fp8, or None."""
    if config.precision != "fp8" or not config.fp8.all_gather:
        return None
    parallel, last = config.parallel, "nearest legal choice"
    if not parallel.fully_sharded:
        return f"fp8.all_gather is for weights that FSDP2 gathers, not for data {parallel.data}; {last}: zero2"
    for name, value, legal in (("parallel.tensor", parallel.tensor, 1), ("parallel.offload", parallel.offload, False),
                               ("parameters", config.parameters, "fp32")):
        if value != legal:
            return (f"fp8.all_gather has not been compared with one process in a layout with {name} {value}; {last}: "
                    f"{name} {str(legal).lower()}, or fp8.all_gather false")
    return None


def _speed_shares(config: TrainConfig) -> str | None:
    """Return why workers cannot have shares by their speed, or None."""
    if not config.elastic.share_by_speed_every_steps:
        return None
    parallel, what = config.parallel, "elastic.share_by_speed_every_steps gives workers different numbers of passes"
    if parallel.data not in ("ddp", "zero1"):
        return (f"{what}, but with data {parallel.data} each pass gathers parameters from all workers; nearest legal "
                "choice: data zero1")
    for name in ("tensor", "pipeline", "context"):
        if (size := getattr(parallel, name)) > 1:
            return (f"{what}, but with parallel.{name} {size} some workers compute each pass together; nearest legal "
                    f"choice: {name} 1")
    for key, reason in (("guards.recomputation", "compares passes of equal shares"),
                        ("compression", "keeps the residuals of equal shares")):
        if getattr(config.guards if key.startswith("guards") else config, key.rpartition(".")[2]) is not None:
            return f"{what}, but {key} {reason}; nearest legal choice: leave {key} out"
    return None


def _equal_attention(config: TrainConfig) -> str | None:
    if config.batch.equal_attention and config.objective.READS != PACKED:
        return (f"batch.equal_attention is for packed sequences, but objective.kind {name_of(type(config.objective))} "
                f"reads {config.objective.READS}; nearest legal choice: batch.group_by_length, or leave it out")
    return None


def _curvature(config: TrainConfig) -> str | None:
    """Return why the optimizer's estimate of the curvature cannot be computed, or None."""
    if not config.optimizer.curvature_every:
        return None
    what = f"optimizer.kind {name_of(type(config.optimizer))} estimates the curvature from labels that the model draws"
    for name in ("tensor", "pipeline", "context"):
        if (size := getattr(config.parallel, name)) > 1:
            return f"{what} from whole rows of logits, but parallel.{name} is {size}; nearest legal choice: {name} 1"
    for key, value, legal in (("objective.kind", name_of(type(config.objective)), objectives.DEFAULT),
                              ("parameters", config.parameters, "fp32")):
        if value != legal:
            return f"{what}, which has not been built for {key} {value}; nearest legal choice: {legal}"
    if config.precision == "fp16":
        return f"{what}, whose gradients have no loss scale; nearest legal choice: precision bf16"
    if config.memory.optimizer_disk:
        return (f"{what} and keeps it in memory, but memory.optimizer_disk moves state away; nearest legal choice: "
                "leave memory.optimizer_disk out")
    if config.compression is not None:
        return (f"{what}, whose gradients compression would send with residuals of others; nearest legal choice: leave "
                "compression out")
    if isinstance(config.model, MixtureOfExperts):
        return f"{what}, but a mixture of experts adds gradients of its balance; nearest legal choice: a dense model"
    return None


def _adapter(config: TrainConfig) -> str | None:
    """Return why an adapter cannot be trained, or None."""
    adapter, last = config.adapter, "nearest legal choice"
    if adapter is None:
        return None
    for name in objective.DIMENSIONS:
        if name not in adapter.WORKS_WITH and getattr(config.parallel, name) > 1:
            return (f"the adapter {name_of(type(adapter))} does not work with parallel.{name} "
                    f"{getattr(config.parallel, name)}; {last}: parallel.{name} 1")
    if config.model.fused_products:
        return f"model.fused_products computes products without the adapters of their layers; {last}: false"
    if config.parallel.async_tensor:
        return f"parallel.async_tensor computes products without the adapters of their layers; {last}: false"
    if config.memory.activation_checkpointing == "selective" and config.memory.keep_products:
        return (f"memory.keep_products numbers the products of a block, to which an adapter adds its own; {last}: "
                "activation_checkpointing full")
    if adapter.base == "plain":
        return None
    if (uneven := nf4_refusal(config.model, config.parallel.tensor)) is not None:
        smaller = [size for size in divisors(config.parallel.tensor) if nf4_refusal(config.model, size) is None]
        return (f"adapter.base {adapter.base} keeps blocks of {BLOCK} entries of a row, which the {uneven[1]} inputs "
                f"of {uneven[0]} with parallel.tensor {config.parallel.tensor} are not; {last}: "
                f"{f'parallel.tensor {max(smaller)}' if smaller else 'adapter.base plain'}")
    if config.precision == "fp8":
        return f"adapter.base {adapter.base} has no fp8 products; {last}: precision bf16"
    return None


def _async_tensor(config: TrainConfig) -> str | None:
    """Return why collectives cannot overlap with products, or None."""
    if not config.parallel.async_tensor:
        return None
    what, last = "parallel.async_tensor", "nearest legal choice"
    if config.precision == "fp8":
        return f"{what}, but torchao's fp8 layers compute their products themselves; {last}: precision bf16"
    if config.parallel.pipeline > 1 and "zero_bubble" in config.parallel.pipeline_schedule:
        return (f"{what} computes the gradients of inputs and weights together, but pipeline_schedule "
                f"{config.parallel.pipeline_schedule} takes them in two passes; {last}: interleaved_1f1b, or "
                "async_tensor false")
    if config.memory.keep_products:
        return (f"{what} keeps every product that it overlaps with a collective, so memory.keep_products has no "
                f"effect; {last}: keep_products []")
    return None


def _workers(config: TrainConfig) -> str | None:
    if sizes(config):
        return None
    parallel, elastic, virtual = config.parallel, config.elastic, config.batch.virtual_ranks
    least, most = elastic.min_workers, elastic.max_workers
    if fitting := _legal_sizes(config, least, most):
        return schedule(config, fitting[0])
    if parallel.unit == parallel.replicate == parallel.expert == 1 and parallel.shard is None:
        return f"no number of workers from {least} to {most} divides batch.virtual_ranks {virtual}"
    possible = _legal_sizes(config)
    if not possible and parallel.shard is not None and virtual % parallel.shard:
        return (f"parallel.shard {parallel.shard} does not divide batch.virtual_ranks {virtual}; nearest that does: "
                f"{nearest(parallel.shard, divisors(virtual))}")
    if not possible and parallel.expert > 1:
        return _expert(config)
    if not possible:
        return (f"parallel.replicate {parallel.replicate} does not divide batch.virtual_ranks {virtual}; nearest that "
                f"does: {nearest(parallel.replicate, divisors(virtual))}")
    copies = f" and is a multiple of replicate {parallel.replicate}" if parallel.replicate > 1 else ""
    if parallel.shard is not None:
        copies = f" and is a multiple of shard {parallel.shard}"
    if parallel.expert > 1:
        copies += f", with a multiple of expert {parallel.expert} in shard x context of each copy"
    return (f"no number of workers from {least} to {most} (elastic.min_workers, max_workers) fits "
            f"{describe(parallel)}: it must be {parallel.unit} times a number that divides batch.virtual_ranks "
            f"{virtual}{copies}; nearest that is: {nearest(most, possible)}")


def _expert(config: TrainConfig) -> str:
    """Return why no number of workers has groups of `parallel.expert`."""
    parallel, virtual = config.parallel, config.batch.virtual_ranks
    shared = {size // parallel.copies(size) * parallel.context for size in divisors(virtual)
              if size % (parallel.shard or parallel.replicate) == 0}
    legal = [expert for expert in range(1, max(shared, default=1) + 1) if any(size % expert == 0 for size in shared)]
    return (f"parallel.expert {parallel.expert} divides shard x context of no number of workers, which batch."
            f"virtual_ranks {virtual} must share evenly; nearest that does: {nearest(parallel.expert, legal)}")


def shape(parallel: ParallelConfig, model: Model, vocabulary_size: int | None) -> str | None:
    """Return why the layout does not fit the model, or None.

    Args:
        parallel: the layout.
        model: its dimensions.
        vocabulary_size: padded; None: not known yet.
    """
    if (reason := _experts(parallel.expert, model)) is not None:
        return reason
    tensor = parallel.tensor
    shared = [("key and value heads", model.kv_heads), ("query heads", model.num_heads),
              ("model.ffn_dim", model.ffn_width), ("the vocabulary", vocabulary_size or tensor),
              ("learned positions, model.max_sequence_length", model.learned_positions or tensor)]
    if isinstance(model, MixtureOfExperts):
        shared.append(("the inner width of an expert", model.expert_width))
    for what, size in shared:
        if size % tensor:
            legal = divisors(*(size for _, size in shared if size not in (0, tensor)))
            return (f"parallel.tensor {tensor} does not divide {what}, {size}; nearest that does: "
                    f"{nearest(tensor, legal)}")
    if (reason := _heads(parallel, model)) is not None:
        return reason
    stages, room = parallel.pipeline * parallel.stages_per_rank, model.num_layers + 2
    if parallel.pipeline > 1 and stages > room:
        return (f"parallel.pipeline {parallel.pipeline} with {parallel.stages_per_rank} stage(s) on each worker is "
                f"more than the {room} pieces of the model (embedding, {model.num_layers} layers, output); nearest "
                f"legal choice: {max(1, room // parallel.stages_per_rank)}")
    return None


def _heads(parallel: ParallelConfig, model: Model) -> str | None:
    """Return why context ranks cannot share the heads, or None. Several ranks may have the same key head."""
    if parallel.context == 1 or parallel.context_method != "all_to_all":
        return None
    query, key = model.num_heads // parallel.tensor, model.kv_heads // parallel.tensor
    possible = [ranks for ranks in divisors(query) if key % ranks == 0 or ranks % key == 0]
    if parallel.context in possible:
        return None
    each = f" on each of {parallel.tensor} tensor ranks" if parallel.tensor > 1 else ""
    return (f"parallel.context {parallel.context} with context_method all_to_all shares the heads, but there are "
            f"{query} query heads and {key} key heads{each}; nearest legal choice: context "
            f"{nearest(parallel.context, possible)}, or context_method all_gather")


def _experts(expert: int, model: Model) -> str | None:
    """Return why the ranks of `parallel.expert` cannot share the experts of a layer evenly, or None."""
    if expert == 1:
        return None
    if not isinstance(model, MixtureOfExperts):
        return (f"parallel.expert {expert} shares experts, but model.kind {name_of(type(model))} has none; nearest "
                "legal choice: 1")
    if model.num_experts % expert:
        return (f"parallel.expert {expert} does not divide model.num_experts {model.num_experts}; nearest that does: "
                f"{nearest(expert, divisors(model.num_experts))}")
    return None


def check_data(config: TrainConfig, vocabulary_size: int, sequence_length: int) -> None:
    """Check that the layout fits the data.

    Args:
        config: of the run.
        vocabulary_size: padded.
        sequence_length: tokens of a row.

    Raises:
        ConfigError: it does not fit.
    """
    reason = shape(config.parallel, config.model, vocabulary_size) or length(config.parallel, sequence_length)
    if reason is not None:
        raise ConfigError(reason, where="parallel", fix="change it, or pack the data differently")


def length(parallel: ParallelConfig, sequence_length: int) -> str | None:
    """Return why the layout cannot shard sequences of this length, or None."""
    halves = 2 * parallel.context  # each context rank has an early and a late chunk, so causal attention is balanced
    if parallel.context > 1 and sequence_length % halves:
        legal = [d for d in range(1, sequence_length + 1) if d == 1 or sequence_length % (2 * d) == 0]
        return (f"parallel.context {parallel.context} needs sequences of a multiple of {halves} tokens, they have "
                f"{sequence_length}; nearest legal choice: {nearest(parallel.context, legal)}")
    if sequence_length // parallel.context % parallel.tensor:
        legal = divisors(sequence_length // parallel.context)
        return (f"parallel.tensor {parallel.tensor} does not divide the {sequence_length // parallel.context} tokens "
                f"of a rank's sequence; nearest that does: {nearest(parallel.tensor, legal)}")
    return None


def check_world(config: TrainConfig, world_size: int) -> None:
    """Check that `world_size` workers can hold the mesh and share the virtual ranks evenly.

    Raises:
        ConfigError: they cannot.
    """
    parallel, virtual = config.parallel, config.batch.virtual_ranks
    possible = _legal_sizes(config)
    if world_size in possible:
        if (reason := schedule(config, world_size)) is not None:
            raise ConfigError(reason, where="parallel.pipeline_schedule",
                              fix="change micro_sequences, global_sequences or the number of workers, or choose gpipe "
                                  "or zbv_zero_bubble, which take any number")
        return
    near = nearest(world_size, possible)
    if config.stage_schedule is not None:
        raise ConfigError(f"a stage_schedule has one worker for each stage, not {world_size} for "
                          f"{describe(parallel)}", where="stage_schedule", fix=f"start {near} workers")
    if world_size % parallel.unit:
        raise ConfigError(f"{world_size} worker(s) cannot hold {describe(parallel)}; nearest number that can: {near}",
                          where="parallel", fix=f"start {near} workers, or make the mesh smaller")
    data = world_size // parallel.unit
    if virtual % data:
        raise ConfigError(f"{data} workers cannot share {virtual} virtual ranks evenly", where="batch.virtual_ranks",
                          fix="make it a multiple of every number of workers the run may have, such as 12 or 60")
    if parallel.shard is not None and data % parallel.shard:
        raise ConfigError(f"{data} data-parallel workers are not a multiple of parallel.shard {parallel.shard}; "
                          f"nearest number of workers that is legal: {near}", where="parallel.shard",
                          fix=f"start {near} workers, or change shard")
    if data % parallel.replicate == 0:
        ranks = data // parallel.copies(data) * parallel.context
        raise ConfigError(f"{ranks} worker(s) of shard x context are not a multiple of parallel.expert "
                          f"{parallel.expert}; nearest number of workers that is legal: {near}",
                          where="parallel.expert", fix=f"start {near} workers, or change expert")
    raise ConfigError(f"{data} data-parallel workers are not a multiple of parallel.replicate {parallel.replicate}; "
                      f"nearest number of workers that is legal: {near}", where="parallel.replicate",
                      fix=f"start {near} workers, or change replicate")


def describe(parallel: ParallelConfig) -> str:
    """Return a description for messages: "a mesh of tensor 2 x pipeline 2"."""
    names = ("tensor", "pipeline", "context", "replicate", "shard", "expert")
    parts = [f"{name} {size}" for name in names if (size := getattr(parallel, name) or 1) > 1]
    return "a mesh of " + (" x ".join(parts) or "data-parallel workers")


def divisors(*numbers: int) -> list[int]:
    """Return the common divisors of `numbers`, ascending."""
    return [d for d in range(1, min(numbers) + 1) if all(number % d == 0 for number in numbers)]


def nearest(value: int, legal: Iterable[int]) -> int:
    """Return the number in `legal` that is closest to `value`, the smaller of two; 1 if `legal` is empty."""
    return min(legal, key=lambda candidate: (abs(candidate - value), candidate), default=1)
