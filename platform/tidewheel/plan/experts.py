"""Experts in a plan: the time of their grouped products, the rows that travel, and the time that the links take.

Loads are counted as balanced: each rank computes as many rows as it sends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tidewheel.models.moe.config import MixtureOfExperts
from tidewheel.plan.hardware import HOP_SECONDS, LINK_SHARE, ClusterConfig, Gpu
from tidewheel.plan.layout import Job, Layout

TILE_BYTES = 580
"""A tile of a product of K columns takes as long as K + TILE_BYTES / (bytes of an element) columns: it is set up and
written. Grouped fp8 products with 8,192 or 4,096 rows for each expert on an H800 reach 1,297 and 1,288 TFLOP/s with
7,168 columns, 1,099 and 1,093 with 2,048 (github.com/deepseek-ai/DeepGEMM, README of 2025-02). With the rate of large
products that gives 584, 636, 566 and 580. Other GPUs are counted alike, an assumption."""

EXCHANGING = 20 / 132
"""Share of a GPU's multiprocessors that an overlapped exchange takes from the passes (arXiv:2412.19437, section
3.2.2)."""


def product_rate(gpu: Gpu, columns: float, size: int) -> float:
    """Return the FLOP/s of grouped products on tensor cores.

    Args:
        gpu: the GPU.
        columns: K, over which a product adds up.
        size: bytes of an element: 2, or 1 for fp8.
    """
    peak = gpu.matmul_fp8 if size == 1 and gpu.matmul_fp8 else gpu.matmul
    return peak * columns / (columns + TILE_BYTES / size)


def products_seconds(job: Job, layout: Layout, gpu: Gpu) -> tuple[float, float]:
    """Return the seconds of the routed experts' products of a block and micro-batch: forward, and backward.

    Each product takes as long as its FLOPs, or the bytes of its rows and of this rank's matrices. Averages over the
    blocks. Tidewheel's experts compute in bf16 also with `precision: fp8`.

    Args:
        job: the run.
        layout: its layout.
        gpu: the GPU.
    """
    model, routed = job.model, job.routed_rows
    if not isinstance(model, MixtureOfExperts):
        return 0.0, 0.0
    rows = rows_bytes(job, layout) / job.model.dim / job.compute_bytes
    experts = routed.experts / layout.parallel.expert * routed.copies / model.experts_per_token
    width = model.expert_width / layout.parallel.tensor
    size = 1 if job.techniques.fp8_experts else job.compute_bytes
    flops, moved = 2 * rows * model.dim * width, size * (rows * (model.dim + width) + experts * model.dim * width)

    def seconds(columns: float) -> float:
        rate = gpu.fp32 if job.config.precision == "fp32" else product_rate(gpu, columns, size)
        return max(flops / rate, moved / gpu.hbm)

    inputs = model.FEED_FORWARD.inputs
    return (inputs * seconds(model.dim) + seconds(width),
            inputs * seconds(width) + seconds(model.dim) + (inputs + 1) * seconds(rows / experts))


def nodes_reached(job: Job, nodes: int) -> float:
    """Return how many nodes have an expert of a token, on average.

    Choices are random. If a group of experts fills a node, a token's experts come from `groups_per_token` nodes.

    Args:
        job: the run, a mixture of experts.
        nodes: number of nodes that share the experts evenly.
    """
    model = job.model
    assert isinstance(model, MixtureOfExperts)
    near = model.num_experts // nodes
    eligible = model.groups_per_token if model.expert_groups == nodes else nodes
    missed = math.comb((eligible - 1) * near, model.experts_per_token) / math.comb(eligible * near,
                                                                                   model.experts_per_token)
    return eligible * (1 - missed)


@dataclass(frozen=True)
class ExpertLinks:
    """The links between the ranks that share the experts."""

    ranks: int
    inside: float
    """Share of a rank's rows that go to other ranks of its node."""
    across: float
    """Share that goes to other nodes."""
    node_link: float
    """Bytes/s to ranks of the node."""
    network: float
    """Bytes/s to ranks of other nodes, over the rank's own adapter."""

    def seconds(self, size: float) -> float:
        """Return the seconds of one exchange in which each rank has rows of `size` bytes.

        Both links work at the same time. Every pair of ranks sends a message of its own, so latency grows with their
        number.
        """
        if self.ranks == 1:
            return 0.0
        return (self.ranks - 1) * HOP_SECONDS + max(self.inside * size / self.node_link,
                                                    self.across * size / self.network)


def expert_links(cluster: ClusterConfig, layout: Layout, job: Job | None = None) -> ExpertLinks:
    """Return the links of a layout. Its ranks are neighbours, `tensor` apart.

    Args:
        cluster: the cluster.
        layout: the layout.
        job: the run, if it may send a row to a node once.
    """
    ranks = layout.parallel.expert
    here = min(ranks, max(1, cluster.nodes_of // layout.parallel.tensor))
    gpu = cluster.kind
    inside, across = (here - 1) / ranks, (ranks - here) / ranks
    if job is not None and job.techniques.once_per_node and across:
        assert isinstance(job.model, MixtureOfExperts)
        across *= nodes_reached(job, ranks // here) / job.model.experts_per_token
        inside = (here - 1) / here  # rows of other nodes are copied too
    return ExpertLinks(ranks, inside, across, gpu.node_link * LINK_SHARE, gpu.network * LINK_SHARE)


def rows_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of the rows that a rank sends to experts in one block and micro-batch.

    Tensor-parallel ranks all have the gathered input, and each sends it to its slice of the experts.

    Args:
        job: the run.
        layout: its layout.
    """
    tokens = layout.micro_sequences * job.sequence_length / layout.parallel.context
    return tokens * job.routed_rows.copies * job.model.dim * job.compute_bytes
