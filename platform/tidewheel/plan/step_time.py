"""Seconds of a training step: a roofline of the passes by FLOPs and bytes, the bubble, and exposed communication.

Every rate is a published or measured one of `hardware.GPUS`; nothing is fitted to step times. Real steps are slower,
since the model leaves out kernel launches, power limits, stragglers, host work and uneven documents.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.plan import communication
from tidewheel.plan.activations import computed_again, share_recomputed, traffic_of_parts
from tidewheel.plan.communication import Axis
from tidewheel.plan.experts import products_seconds
from tidewheel.plan.hardware import ClusterConfig, Gpu
from tidewheel.plan.held import held
from tidewheel.plan.layout import Job, Layout, Share, shares
from tidewheel.plan.offload import disk_seconds, inputs_seconds, offloads, transfers, update_seconds, updating_ranks

ATTENTION_BACKWARD = 2.5
"""Time of attention's backward pass over its forward pass: flash attention recomputes the scores (arXiv:2205.14135,
appendix B.4)."""
OPTIMIZER_TRAFFIC = 28.0
"""Bytes per parameter that AdamW moves: it reads parameter, gradient and two moments, and writes parameter and
moments."""


@dataclass(frozen=True)
class StepTime:
    """Time of one step."""

    seconds: float
    compute: float
    """Seconds of the passes on the busiest rank."""
    bubble: float
    """Share of the pipeline's time in which a rank waits; see `bubble`."""
    optimizer: float
    """Seconds of the update."""
    axes: tuple[Axis, ...]
    mfu: float
    """Model FLOPs (`Model.flops_per_token`: attention full, nothing twice) over the peak of all GPUs."""
    tokens_per_second: float
    """Tokens per second of all GPUs, without failures."""

    @property
    def exposed(self) -> float:
        """Seconds of communication that no computation overlaps."""
        return sum(axis.exposed for axis in self.axes)


def bubble(schedule: str, pipeline: int, micro_batches: int, stages_per_rank: int) -> float:
    """Return the share of the time in which ranks wait.

    1F1B, GPipe: (p-1) / (m + p-1) (arXiv:1811.06965, section 2.3); interleaved: (p-1) / (v m + p-1)
    (arXiv:2104.04473, section 2.2). Zero bubble: passes for the weights fill two thirds of that (a forward and the two
    halves of a backward pass take as long each, arXiv:2401.10241, section 2.3: (p-1) / 3 remain of p-1, of stages that
    are 1 / v of a rank's work), with 2 p micro-batches or more.

    Args:
        schedule: the pipeline schedule.
        pipeline: pipeline ranks, p.
        micro_batches: micro-batches of a step, m.
        stages_per_rank: stages of a rank, v.
    """
    if pipeline == 1:
        return 0.0
    waiting = (pipeline - 1) / (stages_per_rank if schedule.startswith(("interleaved", "zbv")) else 1)
    if "zero_bubble" in schedule:
        waiting /= 3
    return waiting / (micro_batches + waiting)


def step_time(job: Job, layout: Layout, cluster: ClusterConfig) -> StepTime:
    """Return the step time of the slowest pipeline rank.

    Args:
        job: the run.
        layout: its layout.
        cluster: the cluster.
    """
    return max((_of_share(job, layout, cluster, share) for share in shares(job, layout)),
               key=lambda time: time.seconds)


def _of_share(job: Job, layout: Layout, cluster: ClusterConfig, share: Share) -> StepTime:
    p, num_micro_batches, gpu = layout.parallel, layout.micro_batches, cluster.kind
    forward, backward = passes(job, layout, cluster, share)
    parameters = held(job, layout, share)
    groups = communication.groups(cluster, layout)
    again = parameters.blocks if p.data == "zero3" else 0.0
    copies = transfers(job, layout, parameters.whole, again, gpu)
    exchange = communication.expert_axis(job, layout, share, cluster, num_micro_batches * (forward + backward))
    waits = 0.0  # of a pass for rows of the node, during which the network is free
    if not exchange.across_nodes:
        waits = exchange.exposed / num_micro_batches / (2 + share_recomputed(job, layout))
    axes = (communication.tensor_axis(job, layout, share, groups["tensor"], products(job, layout, gpu, share)),
            communication.context_axis(job, layout, share, groups["context"]),
            exchange,
            communication.pipeline_axis(job, layout, cluster, groups["pipeline"]),
            communication.data_axis(job, layout, parameters, groups, forward + waits, backward + waits, copies))
    waiting = bubble(p.pipeline_schedule, p.pipeline, num_micro_batches, p.stages_per_rank)
    compute = num_micro_batches * (forward + backward)
    inside = sum(axis.exposed for axis in axes if axis.name in ("tensor", "context", "expert"))  # stretches every pass
    outside = sum(axis.exposed for axis in axes) - inside
    update = max(optimizer_seconds(job, layout, parameters.whole, gpu),
                 disk_seconds(job, parameters.whole / updating_ranks(layout), cluster))
    seconds = ((compute + inside) / (1 - waiting) + outside + update) / cluster.efficiency
    tokens = job.config.batch.global_sequences * job.row_tokens
    flops = job.flops_per_token * tokens
    return StepTime(seconds, compute, waiting, update, axes, flops / seconds / (gpu.peak * layout.gpus),
                    tokens / seconds)


def passes(job: Job, layout: Layout, cluster: ClusterConfig, share: Share) -> tuple[float, float]:
    """Return the seconds of the forward and the backward pass of one micro-batch; the latter includes recomputation.

    Matrix products: 2 FLOPs a parameter and token forward, 4 backward (arXiv:2001.08361, section 2.1). Attention: 4 H
    E forward for each key that a token sees: S/2 of a document or row of S tokens, fewer with a window. Experts'
    products have the rate of their widths and numbers of rows (`experts.products_seconds`). The rest is bound by memory
    traffic, see `_traffic`.

    Args:
        job: the run.
        layout: its layout.
        cluster: the cluster.
        share: the pipeline rank's part of the model.
    """
    p, model, gpu = layout.parallel, job.model, cluster.kind
    tokens = layout.micro_sequences * job.row_tokens / p.context
    rate = _rate(job, gpu)
    length = min(job.sequence_length, cluster.document_tokens or job.sequence_length)
    scores = tokens * share.blocks * 4 * model.num_heads * model.head_width / p.tensor * seen(job, length)
    scores /= min(rate, gpu.attention)
    elements = tokens * share.blocks * _traffic(job, p.tensor) / gpu.hbm
    of_blocks = products(job, layout, gpu, share)
    forward = of_blocks + scores + elements
    products_again, elements_again, scores_again = computed_again(job, layout)
    of_experts, experts_backward = (share.blocks * seconds for seconds in products_seconds(job, layout, gpu))
    backward = of_blocks * (2 + products_again) + scores * (ATTENTION_BACKWARD + scores_again)
    backward += experts_backward - 2 * of_experts
    backward += elements * (2 + elements_again)
    if layout.memory.activation_checkpointing == "offload":  # the passes overlap the copies as far as they take longer
        moved = inputs_seconds(job, layout, cluster, share.blocks)
        forward, backward = max(forward, moved), max(backward, moved)
    if share.last:
        output = tokens * 2 * job.vocabulary_matrix / p.tensor / (gpu.fp32 if job.config.precision == "fp32" else
                                                                 gpu.matmul)
        # logits are written, then read for the softmax's sums and for the gradient, which is written and read twice
        passed = tokens * job.vocabulary_size / p.tensor * 6 * job.compute_bytes / gpu.hbm
        forward, backward = forward + output + passed / 2, backward + 2 * output + passed / 2
    if job.teacher is not None:  # a forward pass, and the logits again in the backward pass
        own = min(shares(job.teacher, layout), key=lambda part: abs(part.rank - share.rank))
        forward += passes(job.teacher, layout, cluster, own)[0]
    return forward, backward


def products(job: Job, layout: Layout, gpu: Gpu, share: Share) -> float:
    """Return the seconds of the blocks' matrix products in the forward pass of one micro-batch.

    Args:
        job: the run.
        layout: its layout.
        gpu: the GPU.
        share: the pipeline rank's part of the model.
    """
    tokens = layout.micro_sequences * job.sequence_length / layout.parallel.context
    always = tokens * 2 * (job.block_products - job.routed_products) / layout.parallel.tensor / _rate(job, gpu)
    return share.blocks * (always + products_seconds(job, layout, gpu)[0])


def _rate(job: Job, gpu: Gpu) -> float:
    """Return the FLOP/s of the blocks' matrix products."""
    return {"fp32": gpu.fp32, "fp8": gpu.matmul_fp8 or gpu.matmul}.get(job.config.precision, gpu.matmul)


def seen(job: Job, length: int) -> float:
    """Return the number of keys that a token sees, averaged over the tokens of a document and over the layers.

    Args:
        job: the run.
        length: tokens of a document.
    """
    total = 0.0
    for window, layers in job.windows:
        near = min(window or length, length)
        total += layers * (near - near**2 / (2 * length))  # a token sees as many as are before it, at most `near`
    return total / job.model.num_layers


def _traffic(job: Job, tensor: int) -> float:
    """Return the bytes per token and block that a forward pass moves outside matrix products and attention.

    A backward pass moves twice as much. Without compilation nothing is fused and intermediates are fp32, which doubles
    all of it.
    """
    traffic = sum(traffic_of_parts(job, tensor).values())
    return traffic if job.config.compile else 2 * traffic


def optimizer_seconds(job: Job, layout: Layout, parameters: float, gpu: Gpu) -> float:
    """Return the seconds of the optimizer's update, by memory traffic.

    AdamW moves 28 bytes per parameter, 6 more between master weights and bf16 parameters, and 4 for the norm. With
    offload, the host's memory carries what `plan.offload` counts.

    Args:
        job: the run.
        layout: its layout.
        parameters: parameters of this rank's part of the model, before data parallelism.
        gpu: the GPU.
    """
    rows = parameters / updating_ranks(layout)
    if offloads(layout):
        return update_seconds(job, rows, gpu)
    extra = 6.0 if job.weight_bytes == 2 else 0.0
    return rows * (OPTIMIZER_TRAFFIC + extra + 4) / gpu.hbm
