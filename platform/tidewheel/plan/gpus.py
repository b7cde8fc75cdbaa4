"""The GPUs that plans know, a row for each: data-sheet figures, and measured ones where they differ much."""

from __future__ import annotations

from tidewheel.config import Config
from tidewheel.train.metrics.gpu_peaks import peak

GB = 1e9


class Gpu(Config):
    """One kind of GPU, in bytes, FLOP/s and bytes/s. Links count one direction.

    Peaks, memory and NVLink: the vendors' data sheets, dense. `matmul`: the best of many shapes that was measured
    (MAMF, ml-engineering, compute/accelerator). `attention`: FlashAttention-2, as torch's varlen kernel: 35 % of the
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
    bf16: bool = True
    """Whether its matrix units take bf16; without it `peak` and `matmul` are fp16's."""


ROWS: tuple[Gpu, ...] = (
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
        host_memory=128 * GB, host_bandwidth=44.8 * GB),
    # RTX A6000: the same board, but cards copy to each other
    Gpu(name="a6000", memory=48 * GB, peak=peak("RTX A6000"), matmul=134.5e12, fp32=38.7e12, attention=111.6e12,
        hbm=0.768e12, node_link=25 * GB, network=1.25 * GB, host_link=25 * GB,
        host_memory=128 * GB, host_bandwidth=44.8 * GB),
    # a g5.48xlarge shares 100 Gb/s, 768 GB and 2 x 8 channels of DDR4-3200 among 8; A100's shares of the peak
    Gpu(name="a10g", memory=24 * GB, peak=peak("A10G"), matmul=60.9e12, fp32=35e12, attention=50.5e12, hbm=0.6e12,
        node_link=12.5 * GB, network=1.56 * GB, host_link=25 * GB,
        host_memory=96 * GB, host_bandwidth=51.2 * GB),
    # a g4dn.12xlarge shares 50 Gb/s, 192 GB and 6 channels of DDR4-2933 among 4; PCIe 3; FlashAttention-2 does not run:
    # H100's share of the peak for attention, A100's for products, assumptions that a limit of 70 W may not allow
    Gpu(name="t4", memory=16 * GB, peak=peak("T4"), matmul=56.5e12, fp32=8.1e12, attention=22.8e12, hbm=0.32e12,
        node_link=6.25 * GB, network=1.56 * GB, host_link=12.5 * GB,
        host_memory=48 * GB, host_bandwidth=35.2 * GB, bf16=False),
    # Infinity Fabric of 7 x 64 GB/s; products reach half of the peak and attention a quarter, assumptions
    Gpu(name="mi300x", memory=192 * GB, peak=peak("MI300X"), matmul=654e12, matmul_fp8=1307e12, fp32=163.4e12,
        attention=327e12, hbm=5.3e12, node_link=448 * GB, network=50 * GB, host_link=55 * GB,
        host_memory=256 * GB, host_bandwidth=76.8 * GB))
"""A card is a row here, and its peak a row of `train.metrics.gpu_peaks`.
`network` is a 400 Gb/s adapter per GPU (DGX H100, H200, B200), 200 Gb/s with A100."""

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in ROWS}
"""GPUs by name."""
