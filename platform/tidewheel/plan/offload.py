"""Offload to the host (`parallel.offload`) and to disk (`memory.optimizer_disk`): bytes there, copies, the update.

Also the inputs of blocks that `memory.activation_checkpointing: offload` moves there.

FSDP2 keeps a rank's rows of parameters, gradients and optimizer state in pinned host memory. Before each all-gather it
copies the rows to the GPU in the parameters' dtype, on the stream of the all-gather, so the copy is hidden as far as
the gather is. After each reduce-scatter it copies the rows of the gradient back. It does not wait for the first of a
step; later ones it adds up on the CPU, and the backward pass waits meanwhile
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`). The update starts when the last gradient
has arrived, and nothing overlaps it: the norm that clips is of the whole gradient.

State on disk is read, updated and written layer by layer, all three at once; see `train.optim.disk_state`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.plan.hardware import GB, ClusterConfig, Gpu
from tidewheel.plan.held import held
from tidewheel.plan.layout import GRADIENT_BYTES, Job, Layout, Share, shares
from tidewheel.train.memory.inputs_config import AHEAD_OF_DISK, AHEAD_OF_HOST, BUFFERS
from tidewheel.train.optim.disk_config import PIECE_BYTES, PIECES

HOST_SHARE = 0.24
"""Share of the host memory's data-sheet bandwidth that PyTorch's unfused AdamW reaches: 84 bytes per parameter in
1.39 s per billion parameters (arXiv:2101.06840, table 4, PT-CPU) are 60 of the 256 GB/s of a DGX-2's 2 x 6 channels
of DDR4-2666."""
CLIP_TRAFFIC = 12.0
"""Bytes per gradient to take its norm (4) and to scale it (8)."""
MASTER_TRAFFIC = 6.0
"""Bytes per parameter between fp32 master weights and bf16 parameters."""
ADD_TRAFFIC = 12.0
"""Bytes per gradient to add it to an earlier one."""


@dataclass(frozen=True)
class Transfers:
    """Seconds of one micro-batch on one rank; all 0 without offload."""

    forward: float = 0.0
    """Copying rows to the GPU for the forward pass."""
    backward: float = 0.0
    """Copying rows to the GPU for the backward pass (zero3)."""
    gradients: float = 0.0
    """Copying rows of the gradient to the host."""
    added: float = 0.0
    """Adding them to those of an earlier micro-batch, on the CPU."""


def offloads(layout: Layout) -> bool:
    """Return whether the layout keeps its state in host memory."""
    return layout.sharded and layout.parallel.offload


def transfers(job: Job, layout: Layout, whole: float, again: float, gpu: Gpu) -> Transfers:
    """Return the time of the copies of one micro-batch.

    Args:
        job: the run.
        layout: its layout.
        whole: parameters of this rank's part of the model, before data parallelism.
        again: those of them that the backward pass gathers once more.
        gpu: the GPU.
    """
    if not offloads(layout):
        return Transfers()
    rows, rows_again = whole / layout.shards, again / layout.shards
    return Transfers(rows * job.weight_bytes / gpu.host_link, rows_again * job.weight_bytes / gpu.host_link,
                     rows * GRADIENT_BYTES / gpu.host_link, rows * ADD_TRAFFIC / _host_rate(gpu))


def update_seconds(job: Job, rows: float, gpu: Gpu) -> float:
    """Return the seconds of clipping and of the optimizer's update on the CPU.

    Args:
        job: the run.
        rows: parameters of this rank's shard.
        gpu: the GPU, with its share of the host.
    """
    extra = MASTER_TRAFFIC if job.weight_bytes == 2 else 0.0
    return rows * (job.config.optimizer.HOST_TRAFFIC + CLIP_TRAFFIC + extra) / _host_rate(gpu)


def disk_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes on the node's disk of the fullest rank: state, a save's copy of it, and inputs of blocks."""
    return max(2 * _rows(job, layout, share) * job.disk_bytes + _inputs_on_disk(job, layout, share)
               for share in shares(job, layout))


def _inputs_on_disk(job: Job, layout: Layout, share: Share) -> float:
    if not layout.memory.activation_disk:
        return 0.0
    return share.in_flight * share.blocks * _input_bytes(job, layout)


def _input_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of the input of one block in one micro-batch."""
    tokens = layout.micro_sequences * job.row_tokens / layout.parallel.context
    return tokens * job.model.dim * job.residual_bytes / layout.parallel.tensor


def inputs_on_gpu(job: Job, layout: Layout) -> float:
    """Return the bytes of inputs on a GPU that have been fetched ahead; 0 without offload of inputs.

    The input in use is among the tensors of the recomputed block. Those that the forward pass leaves for a while are
    not fetched, and gone when others are.
    """
    if layout.memory.activation_checkpointing != "offload":
        return 0.0
    ahead = AHEAD_OF_DISK if layout.memory.activation_disk else AHEAD_OF_HOST
    return ahead * _input_bytes(job, layout)


def inputs_seconds(job: Job, layout: Layout, cluster: ClusterConfig, blocks: int) -> float:
    """Return the seconds in which the inputs of a micro-batch are copied away, or back: as slow as link or disk.

    Args:
        job: the run.
        layout: its layout.
        cluster: the cluster.
        blocks: of the rank.
    """
    if layout.memory.activation_checkpointing != "offload":
        return 0.0
    link, disk = cluster.kind.host_link, cluster.disk_gbytes * GB
    return blocks * _input_bytes(job, layout) / (min(link, disk) if layout.memory.activation_disk else link)


def disk_seconds(job: Job, rows: float, cluster: ClusterConfig) -> float:
    """Return the seconds in which optimizer state is read from disk and written back, which share its bandwidth.

    Args:
        job: the run.
        rows: parameters that this rank updates.
        cluster: the cluster.
    """
    return 2 * rows * job.disk_bytes / (cluster.disk_gbytes * GB)


def _in_flight(job: Job, layout: Layout) -> float:
    """Return the bytes of optimizer state in memory on its way between disk and update.

    Each piece has the state of `PIECE_BYTES`, or of the largest parameter.
    """
    largest = job.vocabulary_matrix / layout.parallel.tensor / updating_ranks(layout) * job.disk_bytes
    return PIECES * max(largest, PIECE_BYTES) if job.disk_bytes else 0.0


def _rows(job: Job, layout: Layout, share: Share) -> float:
    """Return the parameters that a rank updates."""
    if job.config.adapter is not None:
        updated = job.saved_parameters * share.blocks / job.model.num_layers / layout.parallel.tensor
        return updated / updating_ranks(layout)
    return held(job, layout, share).whole / updating_ranks(layout)


def updating_ranks(layout: Layout) -> int:
    """Return the number of ranks that share an update."""
    if layout.sharded:
        return layout.shards
    return layout.data * layout.parallel.context if layout.parallel.data == "zero1" else 1


def host_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of host memory of the fullest rank: offloaded state, inputs of blocks or what passes to disk."""
    return max(_of_share(job, layout, share) for share in shares(job, layout))


def _of_share(job: Job, layout: Layout, share: Share) -> float:
    size = 0.0
    if offloads(layout):
        rows = held(job, layout, share).whole / layout.shards
        size += rows * (job.weight_bytes + GRADIENT_BYTES + job.optimizer_bytes - job.disk_bytes)
        size += _in_flight(job, layout)
    elif job.paged_bytes:
        updated = job.saved_parameters * share.blocks / job.model.num_layers / layout.parallel.tensor
        size += updated * job.paged_bytes / (layout.shards if layout.sharded else 1)
    if layout.memory.activation_checkpointing == "offload":
        count = share.in_flight * share.blocks
        size += (min(BUFFERS, count) if layout.memory.activation_disk else count) * _input_bytes(job, layout)
    return size


def _host_rate(gpu: Gpu) -> float:
    return HOST_SHARE * gpu.host_bandwidth
