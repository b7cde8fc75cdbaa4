"""Bytes that each axis of a layout sends in a step, and the time that the links take (`plan.links`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tidewheel.plan.activations import repeated_keys, share_recomputed
from tidewheel.plan.compressed import all_reduced
from tidewheel.plan.experts import EXCHANGING, expert_links, rows_bytes
from tidewheel.plan.hardware import HOP_SECONDS, LINK_SHARE, ClusterConfig
from tidewheel.plan.held import Held
from tidewheel.plan.layout import Job, Layout, Share
from tidewheel.plan.links import Group, group, sent
from tidewheel.plan.offload import Transfers


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh in one step, on one rank."""

    name: str
    ranks: int
    across_nodes: bool
    bytes: float
    """Bytes that a rank sends in a step."""
    seconds: float
    """Seconds that the links are busy with them."""
    exposed: float
    """Seconds of these that no computation overlaps."""


def groups(cluster: ClusterConfig, layout: Layout) -> dict[str, Group]:
    """Return the groups of a rank by axis, in the order of the mesh: pipeline, replicate, shard, context, tensor."""
    p = layout.parallel
    inner = p.tensor
    return {"tensor": group(cluster, p.tensor, 1), "context": group(cluster, p.context, inner),
            "shard": group(cluster, layout.shards, inner),  # FSDP2 shards over context ranks too
            "experts": group(cluster, layout.shards // p.expert, inner * p.expert),
            "replicate": group(cluster, layout.copies, inner * layout.shards),
            "data": group(cluster, layout.data * p.context, inner),
            "pipeline": group(cluster, p.pipeline, layout.data * p.context * inner)}


def tensor_axis(job: Job, layout: Layout, share: Share, tensor: Group, products: float = 0.0) -> Axis:
    """Return the communication of tensor parallelism with sequence parallelism.

    Each block has two all-gathers of its normed input and two reduce-scatters of its output, and the same two pairs
    backward (arXiv:2205.05198, section 4.2.2). Recomputed blocks gather again. Activations and their gradients have the
    products' dtype, except that gradients of gathered inputs are summed in the residual stream's dtype, and layers in
    fp8 gather their input in it.

    Computation overlaps none of it without `async_tensor`. With it, all of a block has the products' dtype, and each
    collective runs beside a product in T parts, the first or the last of which has nothing to overlap with.

    Args:
        job: the run.
        layout: its layout.
        share: the pipeline rank's part of the model.
        tensor: the tensor-parallel group.
        products: seconds of the forward pass's products in the blocks, for one micro-batch. The products of the inputs'
            gradients take as long.
    """
    overlaps = layout.parallel.async_tensor
    elements = layout.micro_sequences * job.sequence_length / layout.parallel.context * job.model.dim
    wide, narrow = elements * job.residual_bytes, elements * job.compute_bytes
    again = share_recomputed(job, layout)
    often = 2.0 * share.blocks
    gathered = wide if job.config.precision == "fp8" else narrow
    forward = [("all_gather", gathered, often), ("reduce_scatter", narrow, often)]
    backward = [("reduce_scatter", narrow if overlaps else wide, often), ("all_gather", narrow, often)]
    recomputed = [(kind, size, times * again) for kind, size, times in forward]
    ends = []
    if share.first:  # the embedding's rows are on different ranks
        ends += [("reduce_scatter", wide, 1.0), ("all_gather", wide, 1.0)]
    if share.last:  # before the output matrix
        ends += [("all_gather", wide, 1.0), ("reduce_scatter", wide, 1.0)]
    axis = _axis("tensor", tensor, [*forward, *backward, *recomputed, *ends], layout.micro_batches)
    if not overlaps:
        return axis
    hidden = 0.0
    for calls, repeated in ((forward, 1 + again), (backward, 1.0)):
        seconds = _axis("tensor", tensor, calls, layout.micro_batches).seconds
        hidden += repeated * min(seconds, layout.micro_batches * products * (tensor.ranks - 1) / tensor.ranks)
    return replace(axis, exposed=axis.exposed - hidden)


def context_axis(job: Job, layout: Layout, share: Share, context: Group) -> Axis:
    """Return the communication of context parallelism; of a ring, which overlaps it, an upper bound.

    all_gather: every block gathers the keys and values of whole rows, and scatters their gradients in fp32
    (arXiv:2407.21783, section 3.3.2). ring: keys make the same way hop by hop, once more in the backward pass, and
    their fp32 gradients one hop more (arXiv:2310.01889). all_to_all: queries, keys, values and the output change
    places, and their gradients (arXiv:2309.14509, section 3.2); keys are repeated for ranks without a head.

    Args:
        job: the run.
        layout: its layout.
        share: the pipeline rank's part of the model.
        context: the context-parallel group.
    """
    p, model = layout.parallel, job.model
    tokens = layout.micro_sequences * job.sequence_length
    keys = 2 * tokens * model.kv_heads * model.head_width / p.tensor
    inside = layout.memory.activation_checkpointing in ("attention", "selective")
    again = 1.0 if inside else share_recomputed(job, layout)
    if p.context_method == "all_to_all":
        queries = tokens * model.num_heads * model.head_width / p.tensor / p.context
        moved = 2 * queries + keys * repeated_keys(job, layout) / p.context  # one rank's
        calls = [("all_to_all", moved * job.compute_bytes, share.blocks * (2 + again))]
    elif p.context_method == "ring":
        calls = [("all_gather", keys * job.compute_bytes, share.blocks * (2 + again)),
                 ("reduce_scatter", keys * 4 * p.context / max(1, p.context - 1), float(share.blocks))]
    else:
        calls = [("all_gather", keys * job.compute_bytes, share.blocks * (1 + again)),
                 ("reduce_scatter", keys * 4, float(share.blocks))]
    return _axis("context", context, calls, layout.micro_batches)


def expert_axis(job: Job, layout: Layout, share: Share, cluster: ClusterConfig, passes: float = 0.0) -> Axis:
    """Return the communication of expert parallelism; computation overlaps none of it, unless `Job.techniques` says so.

    In every block rows go to their experts and come back, and so do their gradients; recomputed blocks send them again.

    Args:
        job: the run.
        layout: its layout.
        share: the pipeline rank's part of the model.
        cluster: the cluster.
        passes: seconds of all passes, which may overlap it.
    """
    exchange = expert_links(cluster, layout, job)
    size = rows_bytes(job, layout)
    if exchange.ranks == 1 or not size:
        return Axis("expert", 1, False, 0.0, 0.0, 0.0)
    again = share_recomputed(job, layout)
    # half of them go to experts: rows, and gradients of results
    sizes = [(2 + again, size / job.compute_bytes if job.techniques.fp8_rows else size), (2 + again, size)]
    calls = layout.micro_batches * share.blocks
    seconds = calls * sum(times * exchange.seconds(moved) for times, moved in sizes)
    moved = calls * sum(times * moved for times, moved in sizes) * (exchange.inside + exchange.across)
    exposed = seconds
    if job.techniques.overlapped:
        exposed = max(0.0, seconds - passes) + EXCHANGING * min(seconds, passes)
    return Axis("expert", exchange.ranks, exchange.across > 0, moved, seconds, exposed)


def pipeline_axis(job: Job, layout: Layout, cluster: ClusterConfig, pipeline: Group) -> Axis:
    """Return the communication of pipeline parallelism, counted as not overlapped.

    The residual stream goes from stage to stage, point to point, and its gradient back: 2 v m times the bytes of a
    micro-batch with v stages on a rank (arXiv:2104.04473, section 3.2).

    Args:
        job: the run.
        layout: its layout.
        cluster: the cluster.
        pipeline: the pipeline-parallel group.
    """
    p = layout.parallel
    if p.pipeline == 1:
        return Axis("pipeline", 1, False, 0.0, 0.0, 0.0)
    size = (layout.micro_sequences * job.sequence_length / p.context / p.tensor * job.model.dim * job.residual_bytes)
    times = 2 * p.stages_per_rank * layout.micro_batches
    inside = pipeline.on_a_node == pipeline.ranks
    link = (cluster.kind.node_link if inside else cluster.kind.network) * LINK_SHARE
    seconds = times * (size / link + HOP_SECONDS)
    return Axis("pipeline", p.pipeline, not inside, times * size, seconds, seconds)


def data_axis(job: Job, layout: Layout, held: Held, found: dict[str, Group], forward: float, backward: float,
              copies: Transfers) -> Axis:
    """Return the communication of data parallelism (arXiv:1910.02054, section 7; FSDP, arXiv:2304.11277).

    ddp all-reduces gradients once per step, overlapped by the last backward pass. zero1 also all-gathers the
    parameters. zero2 gathers parameters for each micro-batch, or once per step in a pipeline. zero3 gathers them for
    each forward pass, and the blocks' again for each backward pass. Gradients are reduce-scattered after each
    micro-batch, or once (`reduces_once`). With copies of the model (HSDP), shards are all-reduced over the copies once.
    Nothing overlaps the first gather of a pass and the last reduction of a backward pass, of one unit each.

    Args:
        job: the run.
        layout: its layout.
        held: parameters of this rank's part of the model.
        found: groups of a rank by axis.
        forward: seconds of computation in the forward pass of a micro-batch, which a gather may overlap.
        backward: seconds of computation in its backward pass, which a reduction may overlap.
        copies: copies to and from host memory, which precede gathers and follow reductions (`plan.offload`).
    """
    p, number = layout.parallel, layout.micro_batches
    if not layout.sharded:
        ranks = found["data"]
        size = all_reduced(job, layout, held)
        grads = ranks.seconds("all_reduce", size)
        # a pipeline's gradients are complete when all of its passes have ended
        exposed = grads if p.pipeline > 1 else max(grads * held.first / held.whole, grads - backward)
        moved = sent("all_reduce", size, ranks.ranks)
        if p.data == "zero1":
            size = job.weight_bytes * held.whole
            rows, moved = ranks.seconds("all_gather", size), moved + sent("all_gather", size, ranks.ranks)
            grads, exposed = grads + rows, exposed + rows
        return Axis("data", ranks.ranks, ranks.on_a_node < ranks.ranks, moved, grads,
                    exposed if ranks.ranks > 1 else 0.0)
    shard, replicas = found["shard"], found["replicate"]
    sizes = unit_bytes(job, layout, held)
    own = found["experts"]  # ranks with the same experts
    gather = shard.seconds("all_gather", sizes.forward) + own.seconds("all_gather", sizes.experts) + copies.forward
    reduce = (shard.seconds("reduce_scatter", sizes.reduced) + own.seconds("reduce_scatter", sizes.experts_reduced)
              + copies.gradients)
    again = (shard.seconds("all_gather", sizes.backward) + own.seconds("all_gather", sizes.experts_again)
             + copies.backward)
    gathers = 1 if p.pipeline > 1 and p.data == "zero2" else number
    reductions = 1 if layout.reduces_once else number
    share = held.first / held.whole
    ahead = max(gather * share, gather - forward)  # the first unit comes before anything can be computed
    last = reduce * share
    behind, waited = again + reduce, 0.0
    if layout.shards == 1:  # FSDP2 of one rank copies a unit when it is needed, not ahead
        ahead, behind, waited = gather, reduce, number * again
    exposed = gathers * ahead
    if p.pipeline > 1:
        exposed += number * max(0.0, again - backward) + reduce
    else:
        # gradients that are added up on the host hold up the backward pass, except for the first micro-batch's
        hidden = 1 if copies.added else reductions
        exposed += hidden * max(last, behind - backward) + waited
        if not waited:
            exposed += (number - hidden) * max(0.0, again - backward)
        exposed += (reductions - hidden) * (reduce + copies.added)
    seconds = gathers * gather + number * again + reductions * reduce
    moved = sent("all_gather", gathers * sizes.forward + number * sizes.backward, shard.ranks)
    moved += sent("reduce_scatter", reductions * sizes.reduced, shard.ranks)
    moved += sent("all_gather", gathers * sizes.experts + number * sizes.experts_again, own.ranks)
    moved += sent("reduce_scatter", reductions * sizes.experts_reduced, own.ranks)
    if replicas.ranks > 1:
        size = sizes.reduced / shard.ranks + sizes.experts_reduced / own.ranks
        over = replicas.seconds("all_reduce", size)
        seconds, exposed, moved = seconds + over, exposed + max(0.0, over - backward), moved + sent(
            "all_reduce", size, replicas.ranks)
    across = shard.on_a_node < shard.ranks or (replicas.ranks > 1 and replicas.on_a_node < replicas.ranks)
    return Axis("data", layout.data * p.context, across, moved, seconds, exposed)


@dataclass(frozen=True)
class UnitBytes:
    """Bytes that FSDP2 gathers and reduces in the passes of one micro-batch, of whole results.

    With expert parallelism, routed experts are gathered apart from the rest, by the ranks that have the same ones.
    """

    forward: float
    """Gathered in the forward pass: every unit."""
    backward: float
    """Gathered in the backward pass: the blocks under zero3. The output matrix stays gathered, and the backward pass
    does not read the embedding."""
    reduced: float
    """Reduce-scattered, if the micro-batch is reduced."""
    experts: float
    """Gathered in the forward pass for this rank's experts; 0 without expert parallelism, as in the next two."""
    experts_again: float
    """Gathered for them in the backward pass."""
    experts_reduced: float
    """Reduce-scattered for them."""


def unit_bytes(job: Job, layout: Layout, held: Held) -> UnitBytes:
    """Return the bytes of FSDP2's collectives in a micro-batch.

    Args:
        job: the run.
        layout: its layout.
        held: parameters of the rank's part of the model.
    """
    apart = held.experts_here if held.expert_ranks > 1 else 0.0
    blocks, whole = held.blocks_here - apart, held.whole_here - apart
    twice = layout.parallel.data == "zero3"
    wide, reduced = job.gathered_bytes, layout.reduced_bytes
    return UnitBytes(wide * whole, wide * blocks * twice, reduced * whole, wide * apart, wide * apart * twice,
                     reduced * apart)


def _axis(name: str, ranks: Group, calls: list[tuple[str, float, float]], micro_batches: int) -> Axis:
    """Return an axis whose collectives nothing overlaps.

    `calls` has (kind, bytes, times per micro-batch) of each collective.
    """
    if ranks.ranks == 1:
        return Axis(name, 1, False, 0.0, 0.0, 0.0)
    moved = micro_batches * sum(often * sent(kind, size, ranks.ranks) for kind, size, often in calls)
    seconds = micro_batches * sum(often * ranks.seconds(kind, size) for kind, size, often in calls)
    return Axis(name, ranks.ranks, ranks.on_a_node < ranks.ranks, moved, seconds, seconds)
