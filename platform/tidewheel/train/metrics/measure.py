"""Measure a process: its memory and its own working time."""

from __future__ import annotations

import os
import resource
import sys
import time

import torch


def memory(device: torch.device) -> dict[str, int]:
    """Return the memory of this process in bytes; reads counters only and does not wait for the device.

    Keys: "host_resident_bytes" and, on CUDA, "device_allocated_bytes", "device_reserved_bytes" and "device_peak_bytes"
    (most allocated since the process started).
    """
    counters = {"host_resident_bytes": host_resident_bytes()}
    if device.type == "cuda":
        counters |= {"device_allocated_bytes": torch.cuda.memory_allocated(device),
                     "device_reserved_bytes": torch.cuda.memory_reserved(device),
                     "device_peak_bytes": torch.cuda.max_memory_allocated(device)}
    return counters


def host_resident_bytes() -> int:
    """Return the physical memory of this process in bytes; its maximum so far on systems without /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


class BusyTime:
    """Seconds in which the calling thread ran, or was runnable while other threads had the CPU.

    It leaves out sleep, and a rank that waits for others sleeps (gloo blocks; backward on CPU runs in the thread that
    calls it). So among ranks that wait for each other in every collective, it shows which rank causes the wait: its CPU
    is slower, or shared. Read from /proc/thread-self/schedstat; elsewhere only the running time counts.
    """

    path = "/proc/thread-self/schedstat"  # of the thread that opens it

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open(self.path, os.O_RDONLY)
        except OSError:
            self._file = None
        self._last = self._total()

    def seconds(self) -> float:
        """Return the seconds since the last call. The thread that created this object must call it."""
        before, self._last = self._last, self._total()
        return self._last - before

    def restart(self) -> None:
        """Leave out everything before this call."""
        self._last = self._total()

    def end_step(self) -> None:
        """Do nothing: the kernel measures all the time."""

    def seconds_per_step(self, steps: int) -> float:
        """Return the seconds per step since the last call."""
        return self.seconds() / steps

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
