"""Rank the legal layouts of a job on a cluster by step time, and say why others do not fit.

The configuration fixes everything that decides the result: model, global batch, precision, optimizer, virtual ranks.
Free are the mesh, the kind of data parallelism, the pipeline schedule, the sequences of a micro-batch, and activation
checkpointing.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from tidewheel.errors import ConfigError
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import KEEP_PARAMETERS, Job, Layout
from tidewheel.plan.memory import Memory, memory
from tidewheel.plan.offload import disk_bytes, host_bytes
from tidewheel.plan.refusals import Refused, refusals, too_much
from tidewheel.plan.step_time import StepTime, step_time
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.config import OPTIONS, MemoryConfig
from tidewheel.train.parallel import legal
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.parallel.stages import SCHEDULES

logger = logging.getLogger(__name__)

Data = Literal["ddp", "zero1", "zero2", "zero3"]
CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
LONG_ROWS = 16_384
"""Context parallelism is tried for rows of at least this many tokens. Llama 3 used it only at 131,072
(arXiv:2407.21783)."""
MICRO_SEQUENCES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Planned:
    """A legal layout with its memory and its step time."""

    layout: Layout
    memory: Memory
    time: StepTime
    host: float
    """Bytes of host memory that a rank takes for offloaded state and activations."""
    disk: float = 0.0
    """Bytes of the node's disk that a rank takes for optimizer state."""


@dataclass(frozen=True)
class Ranking:
    """All layouts of a job on a cluster."""

    fitting: tuple[Planned, ...]
    """The fastest layout of each mesh and kind of data parallelism, the fastest first."""
    own: Planned | None
    """The configuration's own layout, if it is legal on this number of GPUs. It may not fit."""
    own_reason: str
    """Why the configuration's own layout is not legal, or does not fit."""
    nearest: Planned | None
    """The fitting layout nearest to the configuration's own, if that does not fit."""
    refused: tuple[Refused, ...]
    """Meshes without a fitting layout."""
    tried: int
    """Number of legal layouts."""


def rank(job: Job, cluster: ClusterConfig) -> Ranking:
    """Rank every layout of a job on a cluster.

    Raises:
        ConfigError: no layout is legal on this number of GPUs.
    """
    if not cluster.kind.bf16 and "bf16" in (job.config.parameters, job.config.precision.replace("fp8", "bf16")):
        raise ConfigError(f"a {cluster.gpu} has no bf16", where="precision",
                          fix="set precision=fp16 and parameters=fp32")
    candidates = [(layout, memory(job, layout)) for layout in layouts(job, cluster)]
    logger.debug("%d legal layouts on %d GPUs", len(candidates), cluster.gpus)
    if not candidates:
        raise ConfigError(_none_legal(job, cluster), where=f"{cluster.gpus} GPUs",
                          fix="choose another number of GPUs, or change batch.virtual_ranks or global_sequences")
    fitting = sorted((_planned(job, layout, used, cluster) for layout, used in candidates
                      if not too_much(job, layout, used, cluster)), key=_order)
    best: dict[tuple[object, ...], Planned] = {}
    for planned in fitting:
        best.setdefault(_mesh(planned.layout), planned)
    own_layout, reason = own(job, cluster)
    nearest = min(fitting, key=lambda planned: (_distance(planned.layout, _requested(job, cluster)), _order(planned)),
                  default=None) if reason else None
    refused = tuple(refusals(job, cluster, candidates, [planned.layout for planned in fitting]))
    return Ranking(tuple(best.values()), own_layout, reason, nearest, refused, len(candidates))


def fastest_of_any_size(job: Job, cluster: ClusterConfig) -> Planned | None:
    """Return the fastest layout if memory were no limit; None: no layout is legal.

    Args:
        job: the run.
        cluster: the cluster.
    """
    return min((_planned(job, layout, memory(job, layout), cluster) for layout in layouts(job, cluster)), key=_order,
               default=None)


def layouts(job: Job, cluster: ClusterConfig) -> Iterator[Layout]:
    """Yield the legal layouts. Tensor and context parallelism stay inside a node, where NVLink is."""
    gpus = cluster.gpus
    for tensor in legal.divisors(gpus):
        for context in _contexts(job, cluster):
            if tensor * context > cluster.nodes_of or gpus % (tensor * context):
                continue
            for pipeline in legal.divisors(gpus // tensor // context):
                probe = ParallelConfig(tensor=tensor, context=context, pipeline=pipeline,
                                       context_method=job.config.parallel.context_method)
                if legal.shape(probe, job.model, job.vocabulary_size) or legal.length(probe, job.sequence_length):
                    continue
                if job.config.batch.virtual_ranks % (gpus // probe.unit) == 0:
                    yield from _of_mesh(job, cluster, probe)


def _of_mesh(job: Job, cluster: ClusterConfig, mesh: ParallelConfig) -> Iterator[Layout]:
    """Yield the legal layouts of one mesh."""
    data = cluster.gpus // mesh.unit
    offload = job.config.parallel.offload  # a setting that stays, and that only these kinds have
    alone = data * mesh.context == 1
    kinds: tuple[Data, ...] = ("ddp",) if alone and not offload else get_args(Data)
    if alone and offload and mesh.pipeline > 1:
        return  # training refuses it
    for kind in [kind for kind in kinds if not offload or kind in ("zero2", "zero3")]:
        sharded = kind in ("zero2", "zero3")
        for replicate in _copies(cluster, mesh, data) if sharded else (1,):
            sizes = _expert_ranks(job, data // replicate * mesh.context) if sharded else [1]
            for schedule, expert in itertools.product(SCHEDULES if mesh.pipeline > 1 else ("1f1b",), sizes):
                reduce = _reduce(job, kind, mesh.pipeline)
                dtype = job.config.parallel.reduce_dtype
                summed_in_bf16 = dtype == "bf16" and replicate > 1 and reduce == "micro_batch"
                if summed_in_bf16 or (expert > 1 and "zero_bubble" in schedule):
                    continue  # `ParallelConfig` refuses both
                parallel = ParallelConfig(
                    data=kind, replicate=replicate, tensor=mesh.tensor, context=mesh.context, pipeline=mesh.pipeline,
                    pipeline_schedule=schedule, expert=expert, reduce=reduce, reduce_dtype=dtype,
                    context_method=mesh.context_method, offload=offload,
                    prefetch=job.config.parallel.prefetch,
                    async_tensor=job.config.parallel.async_tensor and mesh.tensor > 1)
                for micro in MICRO_SEQUENCES:
                    for kept in _kept(job):
                        layout = _legal(job, cluster, parallel, kept, micro)
                        if isinstance(layout, Layout):
                            yield layout


def _legal(job: Job, cluster: ClusterConfig, parallel: ParallelConfig, kept: MemoryConfig,
           micro_sequences: int) -> Layout | str:
    """Return the layout, or the reason why it is not legal."""
    batch = job.config.batch
    unit = batch.virtual_ranks * micro_sequences
    if any(size % unit for size in batch.sizes):
        return (f"batch.global_sequences {batch.global_sequences} is not a multiple of virtual_ranks x micro_sequences "
                f"= {unit}")
    elastic = job.config.elastic.model_copy(update={"min_workers": cluster.gpus, "max_workers": cluster.gpus})
    config: TrainConfig = job.config.model_copy(update={
        "parallel": parallel, "memory": kept, "elastic": elastic,
        "batch": batch.model_copy(update={"micro_sequences": micro_sequences})})
    reason = legal.reason_against(config) or legal.length(parallel, job.sequence_length) or legal.shape(
        parallel, job.model, job.vocabulary_size)
    if reason is not None:
        return reason
    data = cluster.gpus // parallel.unit
    return Layout(parallel, kept, micro_sequences, data, config.batch.micro_batches(data)[-1])


def _expert_ranks(job: Job, shards: int) -> list[int]:
    """Return the possible numbers of ranks that share the experts."""
    return legal.divisors(job.routed_rows.experts, shards)


def _kept(job: Job) -> list[MemoryConfig]:
    """Return the settings of activation checkpointing to try: the three usual ones, and the configuration's own."""
    own, fields = job.config.memory, MemoryConfig.model_fields
    stays: dict[str, object] = {"optimizer_disk": own.optimizer_disk} if own.optimizer_disk else {}
    # a setting of another kind of checkpointing is set back, or the configuration would be refused with this one
    stays |= {name: fields[name].default for name in OPTIONS if getattr(own, name) != fields[name].default}
    usual = [MemoryConfig.model_validate({"activation_checkpointing": kind, **stays}) for kind in CHECKPOINTING]
    return usual if job.config.memory in usual else [*usual, job.config.memory]


def _contexts(job: Job, cluster: ClusterConfig) -> list[int]:
    if job.sequence_length < LONG_ROWS and job.config.parallel.context == 1:
        return [1]
    return legal.divisors(cluster.nodes_of)


def _copies(cluster: ClusterConfig, mesh: ParallelConfig, data: int) -> list[int]:
    """Return the possible numbers of model copies: one, or one per node (HSDP)."""
    inside = max(1, cluster.nodes_of // (mesh.tensor * mesh.context))
    return [1, data // inside] if inside < data and data % inside == 0 else [1]


def _reduce(job: Job, kind: str, pipeline: int) -> Literal["auto", "step", "micro_batch"]:
    """Return `parallel.reduce`, with auto resolved as training does."""
    reduce = job.config.parallel.reduce
    if kind in ("ddp", "zero1") or pipeline > 1:
        return "step"
    return reduce if reduce != "auto" else "micro_batch" if job.parameters > KEEP_PARAMETERS else "step"


# -- the configuration's own -------------------------------------------------------------------


def _requested(job: Job, cluster: ClusterConfig) -> Layout:
    """Return the configuration's own layout on this number of GPUs, legal or not."""
    config = job.config
    p = config.parallel
    kind = p.data
    if kind == "auto":
        kind = "zero3" if job.parameters > KEEP_PARAMETERS and p.pipeline == 1 else "zero2"
    data = max(1, cluster.gpus // p.unit)
    parallel = p.model_copy(update={"data": kind, "reduce": _reduce(job, kind, p.pipeline)})
    return Layout(parallel, config.memory, config.batch.micro_sequences, data, config.batch.micro_batches(data)[-1])


def own(job: Job, cluster: ClusterConfig) -> tuple[Planned | None, str]:
    """Return the configuration's own layout, if it is legal on this number of GPUs, and why it is not or does not fit.

    Args:
        job: the run.
        cluster: the cluster.
    """
    requested = _requested(job, cluster)
    if requested.gpus != cluster.gpus:
        return None, (f"{legal.describe(requested.parallel)} takes a multiple of {requested.parallel.unit} GPUs, not "
                      f"{cluster.gpus}")
    layout = _legal(job, cluster, requested.parallel, requested.memory, requested.micro_sequences)
    if isinstance(layout, str):
        return None, layout
    planned = _planned(job, layout, memory(job, layout), cluster)
    return planned, too_much(job, layout, planned.memory, cluster)


def _planned(job: Job, layout: Layout, used: Memory, cluster: ClusterConfig) -> Planned:
    return Planned(layout, used, step_time(job, layout, cluster), host_bytes(job, layout), disk_bytes(job, layout))


def _none_legal(job: Job, cluster: ClusterConfig) -> str:
    virtual = job.config.batch.virtual_ranks
    return (f"no layout of the model on {cluster.gpus} GPUs is legal: tensor x pipeline x a divisor of "
            f"batch.virtual_ranks {virtual} must be {cluster.gpus}, with whole micro-batches")


def _order(planned: Planned) -> tuple[float, float]:
    return planned.time.seconds, planned.memory.total


def _mesh(layout: Layout) -> tuple[object, ...]:
    p = layout.parallel
    return p.tensor, p.pipeline, p.context, p.data, p.replicate, p.expert


def _distance(one: Layout, other: Layout) -> float:
    """Return how much two layouts differ: doublings of each size, plus one per different choice."""
    sizes = sum(abs(math.log2(getattr(one.parallel, name) / getattr(other.parallel, name)))
                for name in ("tensor", "pipeline", "context", "replicate", "expert"))
    sizes += abs(math.log2(one.micro_sequences / other.micro_sequences))
    choices = [(one.parallel.data, other.parallel.data),
               (one.parallel.pipeline_schedule, other.parallel.pipeline_schedule),
               (one.memory.activation_checkpointing, other.memory.activation_checkpointing)]
    return sizes + sum(a != b for a, b in choices)
