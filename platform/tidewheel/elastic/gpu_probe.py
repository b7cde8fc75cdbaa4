"""Problems of a GPU that its driver knows of: memory errors, fatal Xid errors, throttling because of a fault.

The counters come from NVML (`pip install 'tidewheel[gpu]'`), the Xid errors from the kernel's log if it may be read.
Meanings: NVML API reference, https://docs.nvidia.com/deploy/nvml-api; Xid catalogue, https://docs.nvidia.com/deploy/xid-errors.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tidewheel.train.metrics.gpu_health import REASONS

FATAL_XIDS = {48: "double-bit memory error", 64: "row remapping failed", 74: "NVLink error", 79: "fell off the bus",
              95: "uncontained memory error", 119: "GSP does not respond", 120: "GSP error", 140: "memory error"}
"""Xid errors after which a GPU needs a reset or a replacement. Those of a program's own mistakes are left out."""
RECENT_SECONDS = 3600.0
"""An Xid error older than this is over: the GPU was reset, or works again."""
FAULTS = 0x040 | 0x080
"""Bits of `REASONS` that mean a fault: too hot, or too little power."""
_XID = re.compile(r"NVRM: Xid \(PCI:(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d+)")
_LOG_BYTES = 8192


def gpu_problems(device: Any) -> list[str]:
    """Return what the driver says is wrong with a CUDA device; [] on CPU, and if it says nothing."""
    import torch

    if torch.device(device).type != "cuda":
        return []
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return []
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    try:
        library.nvmlInit()
    except library.NVMLError:
        return []
    try:
        handle = library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        problems = list(_counted(library, handle))
        bus = str(_asked(library, "nvmlDeviceGetPciInfo", handle).busId)
        return problems + xid_problems(kernel_log(), bus, _uptime())
    except (library.NVMLError, AttributeError):  # this driver or GPU does not tell
        return []
    finally:
        library.nvmlShutdown()


def _counted(library: Any, handle: Any) -> Iterator[str]:
    """Yield problems that NVML's counters show. Not every GPU and driver has all of them."""
    with contextlib.suppress(library.NVMLError, AttributeError):
        errors = library.nvmlDeviceGetTotalEccErrors(handle, library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                                                     library.NVML_VOLATILE_ECC)
        if errors:
            yield f"{errors} uncorrected memory (ECC) errors since its last reset"
    with contextlib.suppress(library.NVMLError, AttributeError):
        _, _, pending, failed = library.nvmlDeviceGetRemappedRows(handle)
        if failed:
            yield "memory rows could not be remapped: it must be replaced"
        elif pending:
            yield "memory rows wait for a reset to be remapped"
    with contextlib.suppress(library.NVMLError, AttributeError):
        reasons = int(library.nvmlDeviceGetCurrentClocksEventReasons(handle)) & FAULTS
        if reasons:
            yield "slowed down by " + ", ".join(name for bit, name in REASONS.items() if reasons & bit)


def _asked(library: Any, function: str, *arguments: Any) -> Any:
    return getattr(library, function)(*arguments)


def xid_problems(lines: Iterable[str], bus: str, uptime: float) -> list[str]:
    """Return the fatal Xid errors of one GPU in the kernel's log.

    Args:
        lines: records of /dev/kmsg: "priority,number,microseconds since boot,flags;text".
        bus: the GPU's PCI address, such as 00000000:0A:00.0.
        uptime: seconds since boot.
    """
    domain, _, address = bus.partition(".")[0].lower().partition(":")
    found: dict[int, None] = {}
    for line in lines:
        head, _, text = line.partition(";")
        match = _XID.search(text)
        if match is None or match[2].lower() != address or int(match[3]) not in FATAL_XIDS:
            continue
        if match[1] is not None and int(match[1], 16) != int(domain, 16):  # in clouds, GPUs may differ in it alone
            continue
        fields = head.split(",")
        at = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else uptime
        if uptime - at <= RECENT_SECONDS:
            found[int(match[3])] = None
    return [f"Xid {xid}: {FATAL_XIDS[xid]}" for xid in found]


def kernel_log(path: str = "/dev/kmsg") -> list[str]:
    """Return the records of the kernel's log; [] if this user may not read it.

    Args:
        path: of the device.
    """
    lines: list[str] = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        while True:
            try:
                record = os.read(descriptor, _LOG_BYTES)
            except BrokenPipeError:  # the kernel has overwritten the oldest records: the next read returns later ones
                continue
            if not record:
                return lines
            lines += record.decode("utf-8", "replace").splitlines()
    except OSError:  # there are no more (EAGAIN)
        return lines
    finally:
        os.close(descriptor)


def _uptime() -> float:
    """Return the seconds since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
