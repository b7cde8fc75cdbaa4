"""The peak of each GPU, which MFU is measured against. Metrics and plans share this table; nothing here imports torch.

Dense bf16 FLOP/s with fp32 accumulation from the vendors' data sheets; where a sheet gives only the figure with
sparsity, half of it. One chip has different peaks in different products: an H100 on PCIe has fewer processors and a
lower clock than one on SXM.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuPeak:
    """One product."""

    product: str
    """Name in our tables."""
    device_name: str
    """Pattern of the whole of `torch.cuda.get_device_name`, without "NVIDIA", "GeForce" and "Tesla"."""
    flops: float
    """Dense bf16 FLOP/s."""


PEAKS: tuple[GpuPeak, ...] = (
    GpuPeak("H100 SXM", r"H100( 80GB| 64GB| 96GB)? HBM[23]e?|H100 SXM5.*|H100", 989e12),
    GpuPeak("H100 PCIe", r"H100( 80GB)? PCIe", 756e12),
    GpuPeak("H100 NVL", r"H100 NVL", 835e12),
    GpuPeak("H200 SXM", r"H200( 141GB HBM3e)?|H200 SXM.*", 989e12),
    GpuPeak("H200 NVL", r"H200 NVL", 835e12),
    GpuPeak("GH200", r"GH200 .*", 989e12),
    GpuPeak("H20", r"H20|H20-3e", 148e12),
    GpuPeak("H800 SXM", r"H800( 80GB HBM3)?", 989e12),
    GpuPeak("B200", r"B200", 2250e12),
    GpuPeak("GB200", r"GB200", 2500e12),
    GpuPeak("B300", r"B300( SXM6 AC)?", 2250e12),
    GpuPeak("GB300", r"GB300", 2500e12),
    GpuPeak("A100", r"A100([- ].*)?", 312e12),
    GpuPeak("A800", r"A800([- ].*)?", 312e12),
    GpuPeak("A30", r"A30", 165e12),
    GpuPeak("A40", r"A40", 149.7e12),
    GpuPeak("A10", r"A10", 125e12),
    GpuPeak("A10G", r"A10G", 70e12),
    GpuPeak("L40S", r"L40S", 362e12),
    GpuPeak("L40", r"L40", 181e12),
    GpuPeak("L4", r"L4", 121e12),
    GpuPeak("RTX 3090", r"RTX 3090", 71e12),
    GpuPeak("RTX 4090", r"RTX 4090", 165.2e12),
    GpuPeak("RTX A6000", r"RTX A6000", 154.8e12),
    GpuPeak("T4", r"T4", 65e12),  # fp16's: it has no bf16
    GpuPeak("MI300X", r"AMD Instinct MI300X.*", 1307.4e12),
)
"""Products by the names that drivers report. A part of a GPU (MIG) and products that are not listed have no peak."""


def peak(product: str) -> float:
    """Return the dense bf16 FLOP/s of a product in the table.

    Raises:
        KeyError: the table has no such product.
    """
    return {gpu.product: gpu.flops for gpu in PEAKS}[product]


def peak_of_device(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of the device with this name, None if it is not in the table."""
    name = re.sub(r"^(NVIDIA |GeForce |Tesla )+", "", device_name.strip())
    if " MIG " in name:
        return None
    return next((gpu.flops for gpu in PEAKS if re.fullmatch(gpu.device_name, name)), None)
