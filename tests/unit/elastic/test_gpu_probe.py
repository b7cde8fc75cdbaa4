"""What NVML and the kernel's log say about a GPU, with a driver of our own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tidewheel.elastic import gpu_probe, probe

BUS = "00000000:0A:00.0"


class NVMLError(Exception):
    """The driver does not tell."""


class Driver:
    """Stands in for the module `pynvml`."""

    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, *, ecc: int | None = 0, rows: tuple[int, int, int, int] | None = (0, 0, 0, 0),
                 reasons: int | None = 0) -> None:
        self.ecc, self.rows, self.reasons = ecc, rows, reasons
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1234"
        return "handle"

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return SimpleNamespace(busId=BUS)

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        return self._told(self.ecc)

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        return self._told(self.rows)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self._told(self.reasons)

    def _told(self, value: Any) -> Any:
        if value is None:
            raise NVMLError("not supported")
        return value


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))

    def of(log: tuple[str, ...] = (), **told: Any) -> list[str]:
        driver = Driver(**told)
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        monkeypatch.setattr(gpu_probe, "kernel_log", lambda: log)
        monkeypatch.setattr(gpu_probe, "_uptime", lambda: 10_000.0)
        result = gpu_probe.gpu_problems("cuda:0")
        assert driver.open == 0
        return result

    return of


def test_a_healthy_gpu_and_one_that_tells_nothing_have_no_problem(problems):
    assert problems() == []
    assert problems(ecc=None, rows=None, reasons=None) == []
    assert problems(reasons=0x001 | 0x004) == []  # idle, power cap: as it should be


@pytest.mark.parametrize(("told", "text"), [
    ({"ecc": 4}, "4 uncorrected memory"), ({"rows": (0, 1, 0, 1)}, "must be replaced"),
    ({"rows": (0, 1, 1, 0)}, "wait for a reset"), ({"reasons": 0x040}, "thermal slowdown (hardware)"),
    ({"reasons": 0x084}, "power brake")])
def test_a_fault_is_named(problems, told: dict[str, Any], text: str):
    [problem] = problems(**told)
    assert text in problem


def test_fatal_xid_errors_of_this_gpu_are_found_in_the_kernels_log(problems):
    def line(xid: int, seconds: float, bus: str = "0000:0a:00") -> str:
        return f"3,1201,{int(1e6 * seconds)},-;NVRM: Xid (PCI:{bus}): {xid}, pid=1, GPU has fallen off the bus."

    assert problems((line(79, 9_000),)) == ["Xid 79: fell off the bus"]
    assert problems((line(79, 5_000),)) == []  # more than an hour ago
    assert problems((line(79, 9_000, "0000:0b:00"),)) == []  # another GPU
    assert problems((line(79, 9_000, "0001:0a:00"),)) == []  # another GPU, at this address of another PCI domain
    assert problems((line(79, 9_000, "0a:00"),)) == ["Xid 79: fell off the bus"]  # old drivers name no domain
    assert problems((line(31, 9_000),)) == []  # a program's own mistake
    assert problems(("nonsense", ";", "3,1,x,-;NVRM: Xid (PCI:0000:0a:00): 94, x")) == []


def test_a_kernels_log_that_cannot_be_read_is_empty(tmp_path: Path):
    assert gpu_probe.kernel_log(str(tmp_path / "none")) == []
    (tmp_path / "log").write_text("3,1,1,-;one\n3,2,2,-;two\n")
    assert gpu_probe.kernel_log(str(tmp_path / "log")) == ["3,1,1,-;one", "3,2,2,-;two"]


def test_records_that_follow_overwritten_ones_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A storm of messages overwrites records while they are read; the errors that matter are the newest."""
    (tmp_path / "log").touch()
    reads: list[bytes | OSError] = [b"3,1,1,-;one\n", BrokenPipeError(), b"3,9,9,-;nine\n", BlockingIOError()]

    def read(descriptor: int, count: int) -> bytes:
        answer = reads.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(gpu_probe.os, "read", read)
    assert gpu_probe.kernel_log(str(tmp_path / "log")) == ["3,1,1,-;one", "3,9,9,-;nine"]


def test_without_the_package_or_a_gpu_nothing_is_known(monkeypatch: pytest.MonkeyPatch):
    assert gpu_probe.gpu_problems("cpu") == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_probe.gpu_problems("cuda:0") == []


def test_a_faulty_gpu_does_not_pass_the_probe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_probe, "gpu_problems", lambda device: ["4 uncorrected memory (ECC) errors"])
    with pytest.raises(probe.ProbeError, match="cpu: 4 uncorrected"):
        probe.check_gpu("cpu")
