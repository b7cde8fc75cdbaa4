"""Own time of a device by its events, and what the driver tells of a GPU, with a device and a driver of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.ranks import on_ranks
from tidewheel.train.collectives import Collectives
from tidewheel.train.metrics import gpu_health, reporter
from tidewheel.train.metrics.config import StragglerConfig
from tidewheel.train.metrics.gpu_health import UNKNOWN, GpuHealth, Nvml, open_nvml
from tidewheel.train.metrics.own_time import DeviceTime
from tidewheel.train.metrics.straggler import Stragglers
from tidewheel.train.progress import describe
from tidewheel.train.runtime import Runtime


class Device:
    """A device whose clock the test moves. Its events complete when the test says so; a wait for one fails."""

    def __init__(self) -> None:
        self.now, self.done, self.events, self.queries = 0.0, True, 0, 0

    def event(self) -> Any:
        device, recorded = self, []
        self.events += 1

        def query() -> bool:
            device.queries += 1
            return device.done

        return SimpleNamespace(at=recorded, record=lambda: recorded.append(device.now), query=query,
                               elapsed_time=lambda end: 1000 * (end.at[0] - recorded[0]))


class Block(nn.Module):
    """A block that takes `seconds` of the device's time; beside it, `gather` takes the time that others cause."""

    def __init__(self, device: Device, seconds: float) -> None:
        super().__init__()
        self.device, self.seconds = device, seconds
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.device.now += self.seconds
        return x @ self.weight


def test_the_time_of_the_blocks_in_the_first_step_after_a_reading():
    device = Device()
    blocks = [Block(device, 0.5), Block(device, 0.25)]
    own, x = DeviceTime(blocks, device.event), torch.ones(2, 4)

    def step(evaluate: bool = False) -> None:
        device.now += 10.0  # waiting for a collective
        for block in blocks:
            block(x)
        own.end_step()
        if evaluate:
            with torch.no_grad():
                blocks[0](x)

    step()
    assert device.events == 0, "the first step compiles"
    own.restart()
    step(evaluate=True)
    step()
    assert device.events == 4, "one step per reading"
    assert own.seconds_per_step(2) is None, "its events may be under way: they are read the next time"
    assert device.queries == 0
    blocks[1].seconds = 0.5
    step()
    step()
    assert own.seconds_per_step(2) == pytest.approx(0.75)
    device.done = False
    step()
    assert own.seconds_per_step(1) is None, "the host does not wait for a device that is behind"
    device.done = True
    assert own.seconds_per_step(1) == pytest.approx(1.0)
    own.close()
    before = device.events
    step()
    assert device.events == before


def _name_the_slow_device() -> None:
    """Three ranks under FSDP2; the hosts do the same, and only rank 2's device is slow."""
    rank, device = dist.get_rank(), Device()
    blocks = [Block(device, 0.3 if rank == 2 else 0.1) for _ in range(2)]
    mesh = dist.device_mesh.init_device_mesh("cpu", (3,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
        gather = block._get_fsdp_state()._fsdp_param_group.wait_for_unshard

        def slow_gather(gather: Any = gather) -> None:
            device.now += 5.0  # the wait for the others' rows, which takes as long on every rank
            gather()

        block._get_fsdp_state()._fsdp_param_group.wait_for_unshard = slow_gather
    hot = SimpleNamespace(read=lambda: GpuHealth(900 + rank, 60 + 10 * rank, 0x24 if rank == 2 else 0),
                          close=lambda: None)
    watch = Stragglers(StragglerConfig(every_steps=2, window=2), Collectives(Runtime(rank, 3)),
                       own_time=DeviceTime(blocks, device.event), nvml=hot)
    reported = []
    for _ in range(9):
        x = torch.ones(2, 4)
        for block in blocks:
            x = block(x)
        x.sum().backward()
        reported += watch.step(0.0)
    watch.close()
    if rank:
        assert reported == []
        return
    [(kind, detail)] = reported
    assert (kind, detail["slow_rank"]) == ("straggler", 2)
    assert (detail["own_seconds"], detail["median_seconds"]) == (0.6, 0.2)
    assert describe({"kind": kind, "detail": detail}) == (
        "rank 2 is slow: it takes 0.6 s of a step, the median is 0.2 s; its GPU: 902 MHz, 80 C, slowed down by power "
        "cap, thermal slowdown (driver)")
    assert reporter._gpu_figures(watch.health) == {
        "least_clock_mhz": 900, "highest_temperature_c": 80, "throttled_gpus": 1,
        "throttled_by": {"2": ["power cap", "thermal slowdown (driver)"]}}


def test_the_slow_device_is_named_though_all_hosts_wait_for_it():
    on_ranks(3, _name_the_slow_device)


class Driver:
    """The functions of pynvml that are used, of an old driver that does not know temperatures."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        self.asked.append("init")

    def nvmlShutdown(self) -> None:
        self.asked.append("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-ab-12":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x1 | 0x80


def test_what_the_driver_tells():
    driver = Driver()
    reader = Nvml(driver, "ab-12")
    result = reader.read()
    reader.close()
    assert result == GpuHealth(1980, UNKNOWN, 0x81)
    assert result.throttled_by == ["power brake"], "an idle GPU is not slowed down"
    assert result.describe() == "1980 MHz, slowed down by power brake"
    assert driver.asked == ["init", "shutdown"]
    with pytest.raises(Driver.NVMLError):
        Nvml(driver, "other")


def test_without_a_gpu_or_the_package_nothing_is_told(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(gpu_health.importlib, "import_module", missing)
    assert open_nvml(torch.device("cpu")) is None
    assert open_nvml(torch.device("cuda")) is None
    assert reporter._gpu_figures([]) == {}
    assert GpuHealth().describe() == ""
    shown = describe({"kind": "straggler", "detail": {"slow_rank": 1, "own_seconds": 2.0, "median_seconds": 1.0}})
    assert shown.endswith("the median is 1.0 s")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_of_a_gpu():
    block = nn.Linear(2048, 2048, device="cuda")
    own, x = DeviceTime([block]), torch.ones(2048, 2048, device="cuda")
    own.restart()
    for _ in range(2):
        block(x)
        own.end_step()
        own.seconds_per_step(1)
        torch.cuda.synchronize()
    seconds = own.seconds_per_step(1)
    assert seconds is not None
    assert 0 < seconds < 1
