"""GPUs and links that plans know: data-sheet figures, and measured ones where they differ much."""

from __future__ import annotations

import difflib
from functools import cached_property
from typing import Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.plan.config import FailureConfig
from tidewheel.train.metrics.gpu_peaks import peak

GB = 1e9
LINK_SHARE = 0.82
"""Share of a link's data-sheet bandwidth that an NCCL ring reaches: 367.6 of 450 GB/s on 8 H200 without in-switch
reduction (ml-engineering, network/benchmarks/results/all-reduce-8xH200.md). It is used for networks as well."""
HOP_SECONDS = 2.9e-6
"""Latency of one of the 2 (N-1) steps of a small all-reduce: 40 us at 32 KiB on 8 H200 (same source)."""


class Gpu(Config):
    """One kind of GPU, in bytes, FLOP/s and bytes/s. Links count one direction.

    Peaks, memory and NVLink: NVIDIA's data sheets, dense. `matmul`: the best of many shapes that was measured (MAMF,
    ml-engineering, compute/accelerator). `attention`: FlashAttention-2, which torch's varlen kernel is: 35 % of the
    peak on H100 (arXiv:2407.08608, section 1), 225 TFLOP/s in training on A100 (arXiv:2307.08691, section 1).
    """

    name: str
    memory: float
    """Bytes of device memory as sold."""
    peak: float
    """Dense bf16 FLOP/s, which MFU is measured against."""
    matmul: float
    """bf16 FLOP/s that large matrix products reach."""
    matmul_fp8: float = 0.0
    """The same in fp8; 0: no fp8."""
    fp32: float
    """FLOP/s without tensor cores."""
    attention: float
    """FLOP/s that the attention kernel reaches on the half of the scores that a causal mask leaves."""
    hbm: float
    """Bytes/s of device memory."""
    node_link: float
    """Bytes/s between the GPUs of a node: NVLink, or PCIe in nodes without NVLink."""
    network: float
    """Bytes/s of a GPU's share of the node's network."""
    host_link: float
    """Bytes/s to pinned host memory."""
    host_memory: float
    """Bytes of a GPU's share of the node's host memory."""
    host_bandwidth: float
    """Bytes/s of a GPU's share of the host memory's data-sheet bandwidth."""


GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in (
    Gpu(name="h100", memory=80 * GB, peak=peak("H100 SXM"), matmul=794.5e12, matmul_fp8=1402.6e12, fp32=67e12,
        attention=346e12, hbm=3.35e12, node_link=450 * GB, network=50 * GB, host_link=55 * GB,
        host_memory=256 * GB, host_bandwidth=76.8 * GB),  # DGX H100: 2 TB, 16 channels of DDR5-4800
    # a device copy was measured at 4.3 of 4.8 TB/s; the others keep their data sheets' figures
    Gpu(name="h200", memory=141 * GB, peak=peak("H200 SXM"), matmul=794.5e12, matmul_fp8=1453.4e12, fp32=67e12,
        attention=346e12, hbm=4.3e12, node_link=450 * GB, network=50 * GB, host_link=55 * GB,
        host_memory=256 * GB, host_bandwidth=76.8 * GB),
    Gpu(name="a100", memory=80 * GB, peak=peak("A100"), matmul=271.2e12, fp32=19.5e12, attention=225e12, hbm=2.04e12,
        node_link=300 * GB, network=25 * GB, host_link=25 * GB,
        host_memory=256 * GB, host_bandwidth=51.2 * GB),  # DGX A100: 2 TB, 16 channels of DDR4-3200
    # FlashAttention-2 runs on Ampere's instructions: H100's rate, an assumption
    Gpu(name="b200", memory=180 * GB, peak=peak("B200"), matmul=1745e12, matmul_fp8=3432.5e12, fp32=80e12,
        attention=346e12, hbm=8e12, node_link=900 * GB, network=50 * GB, host_link=55 * GB,
        host_memory=256 * GB, host_bandwidth=89.6 * GB),  # DGX B200: 2 TB, 16 channels of DDR5-5600
    # matmul and attention are not published: A100's shares of the peak, an assumption; 200 Gb/s per two GPUs as in OVX
    Gpu(name="l40s", memory=48 * GB, peak=peak("L40S"), matmul=314e12, matmul_fp8=637e12, fp32=91.6e12,
        attention=260e12, hbm=0.864e12, node_link=25 * GB, network=12.5 * GB, host_link=25 * GB,
        host_memory=128 * GB, host_bandwidth=76.8 * GB),
    # H100 with NVLink of 200 GB/s per direction (arXiv:2412.19437, section 3.1)
    Gpu(name="h800", memory=80 * GB, peak=peak("H800 SXM"), matmul=794.5e12, matmul_fp8=1402.6e12, fp32=67e12,
        attention=346e12, hbm=3.35e12, node_link=200 * GB, network=50 * GB, host_link=55 * GB,
        host_memory=256 * GB, host_bandwidth=76.8 * GB),
    # Two cards on a desktop board, all assumptions: A100's shares of the peak; without peer-to-peer copies data between
    # cards pass the host, at half its link; 10 Gb/s Ethernet; 256 GB in two channels of DDR5-5600
    Gpu(name="rtx3090", memory=24 * GB, peak=peak("RTX 3090"), matmul=61.8e12, fp32=35.6e12, attention=51e12,
        hbm=0.936e12, node_link=12.5 * GB, network=1.25 * GB, host_link=25 * GB,
        host_memory=128 * GB, host_bandwidth=44.8 * GB),
    Gpu(name="rtx4090", memory=24 * GB, peak=peak("RTX 4090"), matmul=143.7e12, matmul_fp8=287e12, fp32=82.6e12,
        attention=119e12, hbm=1.008e12, node_link=12.5 * GB, network=1.25 * GB, host_link=25 * GB,
        host_memory=128 * GB, host_bandwidth=44.8 * GB))}
"""GPUs by name. `network` is a 400 Gb/s adapter per GPU (DGX H100, H200, B200), 200 Gb/s with A100."""


class ClusterConfig(Config):
    """The cluster that a run is planned for, and assumptions about it."""

    gpus: int = Field(ge=1)
    """Number of GPUs, with one worker on each."""
    gpu: Literal["h100", "h200", "a100", "b200", "l40s", "h800", "rtx3090", "rtx4090"] = "h100"
    """Kind of the GPUs."""
    nodes_of: int = Field(default=8, ge=1)
    """GPUs per node, which NVLink connects."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Memory of a GPU; default: the data sheet's."""
    reserved_gb: float = Field(default=4.0, ge=0)
    """Memory for the CUDA context, NCCL's buffers and what the allocator cannot use: an assumption."""
    node_link_gbytes: float | None = Field(default=None, gt=0)
    """GB/s between GPUs of a node, one direction; default: the data sheet's."""
    network_gbytes: float | None = Field(default=None, gt=0)
    """GB/s of each GPU's share of the network, one direction (50 is 400 Gb/s); default: 50, a100 25, l40s 12.5, rtx
    1.25."""
    host_memory_gb: float | None = Field(default=None, gt=0)
    """Each GPU's share of the node's host memory; default: 256, l40s and rtx 128."""
    host_gbytes: float | None = Field(default=None, gt=0)
    """GB/s of each GPU's share of the host memory's data-sheet bandwidth, for `parallel.offload`; default: 77, a100 51,
    b200 90, rtx 45."""
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
