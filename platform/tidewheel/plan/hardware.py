"""The cluster of a plan, and assumptions about its links."""

from __future__ import annotations

import difflib
from functools import cached_property

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.plan.config import FailureConfig
from tidewheel.plan.gpus import GB as GB
from tidewheel.plan.gpus import GPUS as GPUS
from tidewheel.plan.gpus import Gpu as Gpu

LINK_SHARE = 0.82
"""Share of a link's data-sheet bandwidth that an NCCL ring reaches: 367.6 of 450 GB/s on 8 H200 without in-switch
reduction (ml-engineering, network/benchmarks/results/all-reduce-8xH200.md). It is used for networks as well."""
HOP_SECONDS = 2.9e-6
"""Latency of one of the 2 (N-1) steps of a small all-reduce: 40 us at 32 KiB on 8 H200 (same source)."""


class ClusterConfig(Config):
    """The cluster that a run is planned for, and assumptions about it."""

    gpus: int = Field(ge=1)
    """Number of GPUs, with one worker on each."""
    gpu: str = "h100"
    """Kind of the GPUs, a name in `plan/gpus.py`."""
    nodes_of: int = Field(default=8, ge=1)
    """GPUs per node, which NVLink connects."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Memory of a GPU; default: the data sheet's."""
    reserved_gb: float = Field(default=4.0, ge=0)
    """Memory for the CUDA context, NCCL's buffers and what the allocator cannot use: an assumption."""
    node_link_gbytes: float | None = Field(default=None, gt=0)
    """GB/s between GPUs of a node, one direction; default: the data sheet's."""
    network_gbytes: float | None = Field(default=None, gt=0)
    """GB/s of each GPU's share of the network, one direction (50 is 400 Gb/s); default: the row of the GPU in
    `plan/gpus.py`, as for the next two."""
    host_memory_gb: float | None = Field(default=None, gt=0)
    """Each GPU's share of the node's host memory."""
    host_gbytes: float | None = Field(default=None, gt=0)
    """GB/s of each GPU's share of the host memory's data-sheet bandwidth, for `parallel.offload`."""
    disk_gbytes: float = Field(default=3.0, gt=0)
    """GB/s of each GPU's share of the node's local disks, read or written, for `memory.optimizer_disk`. This is an
    assumption: half of a PCIe 4 NVMe disk; `python -m tests.benchmarks.disk_offload` measures yours."""
    disk_gb: float = Field(default=1000.0, gt=0)
    """Free space of each GPU's share of these disks: an assumption."""
    storage_gbytes_per_gpu: float = Field(default=0.122, gt=0)
    """GB/s to and from storage for each GPU: Llama 3's sustained 2 TB/s for 16,384 (arXiv:2407.21783, section
    3.3.1)."""
    efficiency: float = Field(default=1.0, gt=0, le=1.5)
    """Measured tokens/s of a run of yours, divided by this plan's. Steps take that much longer. 1: the roofline."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0)
    """Price in your currency. Without it, cost is in GPU hours only."""
    document_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a typical document: attention does not look beyond one. Default: as long as the sequence."""
    failures: FailureConfig = FailureConfig()
    """How often the run is interrupted."""

    @pydantic.field_validator("gpu", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        if isinstance(value, str) and value.lower() not in GPUS:
            near = difflib.get_close_matches(value.lower(), GPUS, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no figures for the GPU {value!r}{hint}; known: {', '.join(GPUS)}")
        return value.lower() if isinstance(value, str) else value

    @pydantic.model_validator(mode="after")
    def _whole_nodes(self) -> ClusterConfig:
        if self.gpus > self.nodes_of and self.gpus % self.nodes_of:
            near = max(1, round(self.gpus / self.nodes_of)) * self.nodes_of
            raise ValueError(f"{self.gpus} GPUs do not fill whole nodes of {self.nodes_of}; the nearest number is "
                             f"{near}")
        return self

    @cached_property
    def kind(self) -> Gpu:
        """The GPU, with overridden figures."""
        changed = {"memory": self.memory_gb, "node_link": self.node_link_gbytes, "network": self.network_gbytes,
                   "host_memory": self.host_memory_gb, "host_bandwidth": self.host_gbytes}
        return GPUS[self.gpu].model_copy(update={name: value * GB for name, value in changed.items()
                                                 if value is not None})

    @property
    def usable_bytes(self) -> float:
        """Memory of a GPU that a run may fill."""
        return self.kind.memory - self.reserved_gb * GB
