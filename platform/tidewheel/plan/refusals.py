"""Why meshes and layouts do not fit a cluster, and the nearest that do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tidewheel.plan.hardware import GB, ClusterConfig
from tidewheel.plan.layout import Job, Layout
from tidewheel.plan.memory import Memory
from tidewheel.plan.offload import disk_bytes, host_bytes
from tidewheel.train.parallel import compressing, legal
from tidewheel.train.parallel.config import ParallelConfig


@dataclass(frozen=True)
class Refused:
    """A mesh that cannot be used, and the nearest one that can."""

    what: str
    reason: str
    nearest: str


def too_much(job: Job, layout: Layout, used: Memory, cluster: ClusterConfig) -> str:
    """Return why a layout does not fit the memory of the GPUs or of the hosts, or "".

    Args:
        job: the run.
        layout: the layout.
        used: its memory of a GPU.
        cluster: the cluster.
    """
    if used.total <= cluster.usable_bytes:
        host, there = host_bytes(job, layout), cluster.kind.host_memory
        if host > there:
            return (f"needs {host / GB:.1f} GB of host memory for each GPU, which has {there / GB:.1f} "
                    "(--assume host_memory_gb=...)")
        disk = disk_bytes(job, layout) / GB
        return "" if disk <= cluster.disk_gb else (
            f"needs {disk:.1f} GB of local disk for each GPU, which has {cluster.disk_gb:.1f} (--assume disk_gb=...)")
    largest = sorted(used.parts().items(), key=lambda part: -part[1])[:2]
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in largest)
    return (f"needs {used.total / GB:.1f} GB of the {cluster.usable_bytes / GB:.1f} that a "
            f"{cluster.gpu} can use (largest parts: {parts})")


def refusals(job: Job, cluster: ClusterConfig, candidates: list[tuple[Layout, Memory]],
             fitting: list[Layout]) -> Iterator[Refused]:
    """Yield the tensor and pipeline sizes for which no layout fits. The remaining ranks are data parallel.

    Args:
        job: the run.
        cluster: the cluster.
        candidates: all legal layouts, with their memory.
        fitting: those that fit.
    """
    good = {(layout.parallel.tensor, layout.parallel.pipeline) for layout in fitting}
    for tensor in legal.divisors(cluster.gpus):
        if tensor > cluster.nodes_of:
            yield Refused(f"TP {tensor}", f"parallel.tensor {tensor} would span several nodes of {cluster.nodes_of} "
                                          "GPUs",
                          f"TP {cluster.nodes_of}")
            break  # larger ones would too
        for pipeline in legal.divisors(cluster.gpus // tensor):
            if (tensor, pipeline) in good:
                continue
            of_this_mesh = [(layout, memory) for layout, memory in candidates
                            if (layout.parallel.tensor, layout.parallel.pipeline) == (tensor, pipeline)]
            reason = _against_mesh(job, cluster, tensor, pipeline) or _least(job, cluster, of_this_mesh)
            near = min(good, key=lambda size: (abs(math.log2(size[0] / tensor)) + abs(math.log2(size[1] / pipeline)),
                                               size), default=None)
            yield Refused(f"TP {tensor} x PP {pipeline} x DP {cluster.gpus // tensor // pipeline}", reason,
                          f"TP {near[0]} x PP {near[1]}" if near else "none")
            if pipeline > job.model.num_layers + 2:
                break


def _against_mesh(job: Job, cluster: ClusterConfig, tensor: int, pipeline: int) -> str:
    mesh = ParallelConfig(tensor=tensor, pipeline=pipeline)
    if reason := legal.shape(mesh, job.model, job.vocabulary_size) or legal.length(mesh, job.sequence_length):
        return reason
    replicated = mesh.model_copy(update={"data": "zero1"})
    if reason := compressing.reason_against(job.config.model_copy(update={"parallel": replicated})):
        return reason
    data, virtual = cluster.gpus // mesh.unit, job.config.batch.virtual_ranks
    if virtual % data:
        return (f"{data} data-parallel ranks do not divide batch.virtual_ranks {virtual}; nearest that do: "
                f"{legal.nearest(data, legal.divisors(virtual))}")
    return ""


def _least(job: Job, cluster: ClusterConfig, tried: list[tuple[Layout, Memory]]) -> str:
    if not tried:
        return "no schedule works with the number of micro-batches that a rank would have"
    layout, used = min(tried, key=lambda candidate: candidate[1].total)
    kept = layout.memory.activation_checkpointing
    return f"even {layout.parallel.data} with checkpointing {kept} {too_much(job, layout, used, cluster)}"
