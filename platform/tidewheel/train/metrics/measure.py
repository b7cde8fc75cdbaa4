"""What a process can measure about itself: memory, its own working time, and the share of the device's peak it uses."""

from __future__ import annotations

import os
import resource
import sys
import time

import torch

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 FLOP/s by device name, from NVIDIA's data sheets; MFU is left out for any other device."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name, None when it is not in `PEAK_FLOPS`."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


def memory(device: torch.device) -> dict[str, int]:
    """Bytes: "host_resident_bytes" of this process and, on CUDA, "device_allocated_bytes", "device_reserved_bytes" and
    "device_peak_bytes" (most allocated since the process began). Reads counters only; waits for nothing."""
    found = {"host_resident_bytes": host_resident_bytes()}
    if device.type == "cuda":
        found |= {"device_allocated_bytes": torch.cuda.memory_allocated(device),
                  "device_reserved_bytes": torch.cuda.memory_reserved(device),
                  "device_peak_bytes": torch.cuda.max_memory_allocated(device)}
    return found


def host_resident_bytes() -> int:
    """Physical memory of this process; where /proc is missing, the most it ever had."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


class BusyTime:
    """Seconds that the calling thread computed or wanted to: running, and runnable while others had the CPU.

    What it slept is left out, and waiting for other ranks is sleeping (gloo blocks; backward on CPU runs in the thread
    that calls it). So among ranks that wait for each other in every collective this shows who makes the others wait: a
    slower CPU, or one shared with somebody else. From /proc/thread-self/schedstat; elsewhere running time alone.
    """

    place = "/proc/thread-self/schedstat"  # of the thread that opens it

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open(self.place, os.O_RDONLY)
        except OSError:
            self._file = None
        self._last = self._total()

    def seconds(self) -> float:
        """Since the last call, or since the beginning; to be called by the thread that made this object."""
        before, self._last = self._last, self._total()
        return self._last - before

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _total(self) -> float:
        if self._file is None:
            return time.thread_time()
        running, waiting, _ = os.pread(self._file, 128, 0).split()
        return (int(running) + int(waiting)) / 1e9
