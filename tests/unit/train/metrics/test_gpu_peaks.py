"""The peak of each GPU by the name that its driver reports."""

from __future__ import annotations

import re

import pytest

from tidewheel.plan.hardware import GPUS
from tidewheel.train.metrics.gpu_peaks import PEAKS, peak, peak_of_device
from tidewheel.train.metrics.meter import Meter


@pytest.mark.parametrize(("device_name", "product"), [
    ("NVIDIA H100 80GB HBM3", "H100 SXM"),
    ("NVIDIA H100 PCIe", "H100 PCIe"),
    ("NVIDIA H100 NVL", "H100 NVL"),
    ("NVIDIA H200", "H200 SXM"),
    ("NVIDIA H200 NVL", "H200 NVL"),
    ("NVIDIA GH200 480GB", "GH200"),
    ("NVIDIA H20", "H20"),
    ("NVIDIA B200", "B200"),
    ("NVIDIA GB200", "GB200"),
    ("NVIDIA B300 SXM6 AC", "B300"),
    ("NVIDIA A100-SXM4-80GB", "A100"),
    ("NVIDIA A100 80GB PCIe", "A100"),
    ("NVIDIA A10G", "A10G"),
    ("NVIDIA A10", "A10"),
    ("NVIDIA L40S", "L40S"),
    ("NVIDIA L4", "L4"),
    ("NVIDIA GeForce RTX 3090", "RTX 3090"),
    ("NVIDIA GeForce RTX 4090", "RTX 4090"),
])
def test_a_device_has_the_peak_of_its_product(device_name, product):
    assert peak_of_device(device_name) == peak(product)


@pytest.mark.parametrize("device_name", [
    "AMD EPYC", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla V100-SXM2-16GB", ""])
def test_other_devices_have_no_peak(device_name):
    assert peak_of_device(device_name) is None


def test_each_product_has_one_peak_and_no_name_fits_two():
    assert len({gpu.product for gpu in PEAKS}) == len(PEAKS)
    for gpu in PEAKS:
        assert [other.product for other in PEAKS if re.fullmatch(other.device_name, gpu.product)] in ([gpu.product], [])


def test_plans_and_metrics_have_the_same_peaks():
    assert {name: gpu.peak for name, gpu in GPUS.items()} == {
        "h100": peak_of_device("NVIDIA H100 80GB HBM3"), "h200": peak_of_device("NVIDIA H200"),
        "a100": peak_of_device("NVIDIA A100-SXM4-80GB"), "b200": peak_of_device("NVIDIA B200"),
        "l40s": peak_of_device("NVIDIA L40S"), "h800": peak_of_device("NVIDIA H800"),
        "rtx3090": peak_of_device("NVIDIA GeForce RTX 3090"), "rtx4090": peak_of_device("NVIDIA GeForce RTX 4090"),
        "a6000": peak_of_device("NVIDIA RTX A6000"), "a10g": peak_of_device("NVIDIA A10G"),
        "t4": peak_of_device("Tesla T4"), "mi300x": peak_of_device("AMD Instinct MI300X")}


def test_mfu_of_known_numbers():
    """1,000 tokens in half a second on four devices of 1e9 FLOP/s, at 1e6 FLOPs a token: half of the peak."""
    import torch

    meter = Meter(every_steps=2, last_step=2, world_size=4, device=torch.device("cpu"), flops_per_token=1e6, peak=1e9)
    assert meter.step(1, tokens=400, seconds=0.2, waited=0.0) is None
    line = meter.step(2, tokens=600, seconds=0.3, waited=0.1)
    assert line is not None
    assert line["tokens_per_second"] == pytest.approx(2000)
    assert line["mfu"] == pytest.approx(2000 * 1e6 / 4e9)
