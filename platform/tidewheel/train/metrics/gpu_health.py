"""Clock, temperature and reasons for a reduced clock of this process's GPU, as the driver tells them (NVML).

They need the package nvidia-ml-py (`pip install 'tidewheel[gpu]'`). Without it, or without a GPU, there are none.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)
REASONS = {
    0x004: "power cap", 0x008: "hardware slowdown", 0x010: "sync boost", 0x020: "thermal slowdown (driver)",
    0x040: "thermal slowdown (hardware)", 0x080: "power brake", 0x200: "board limit", 0x400: "reliability limit"}
"""NVML's bits of `nvmlClocksEventReason*` that mean a GPU is slower than it could be. An idle GPU and clocks that the
user or a display has set are left out."""
UNKNOWN = -1


@dataclass(frozen=True)
class GpuHealth:
    """State of a GPU at a reading."""

    clock_mhz: int = UNKNOWN
    """Clock of the streaming multiprocessors."""
    temperature_c: int = UNKNOWN
    reasons: int = UNKNOWN
    """Why the clock is reduced: the bits of `REASONS`."""

    @property
    def known(self) -> bool:
        """Whether the driver told anything."""
        return self.clock_mhz != UNKNOWN or self.temperature_c != UNKNOWN or self.reasons != UNKNOWN

    @property
    def throttled_by(self) -> list[str]:
        """Names of the reasons for a reduced clock."""
        return [name for bit, name in REASONS.items() if self.reasons != UNKNOWN and self.reasons & bit]

    def describe(self) -> str:
        """Return a text for messages; "" if nothing is known."""
        parts = []
        if self.clock_mhz != UNKNOWN:
            parts.append(f"{self.clock_mhz} MHz")
        if self.temperature_c != UNKNOWN:
            parts.append(f"{self.temperature_c} C")
        if self.throttled_by:
            parts.append("slowed down by " + ", ".join(self.throttled_by))
        return ", ".join(parts)


class Nvml:
    """Reads the state of one GPU. It talks to the driver, not to the device, so nothing waits for the GPU's work.

    Args:
        library: the module `pynvml`.
        uuid: of the GPU, with or without "GPU-".

    Raises:
        library.NVMLError: there is no driver, or it does not know the GPU.
    """

    def __init__(self, library: Any, uuid: str) -> None:
        self._library = library
        library.nvmlInit()
        self._handle = library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    def read(self) -> GpuHealth:
        """Return the GPU's state; what the driver does not tell is unknown."""
        library, handle = self._library, self._handle
        reasons = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons",
                          getattr(library, "nvmlDeviceGetCurrentClocksThrottleReasons", None))  # its former name
        return GpuHealth(
            self._asked(library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_SM),
            self._asked(library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU),
            self._asked(reasons, handle) if reasons is not None else UNKNOWN)

    def _asked(self, function: Any, *arguments: Any) -> int:
        value = UNKNOWN
        with contextlib.suppress(self._library.NVMLError):  # not every GPU and driver tells everything
            value = int(function(*arguments))
        return value

    def close(self) -> None:
        """Release the library."""
        with contextlib.suppress(self._library.NVMLError):
            self._library.nvmlShutdown()


def open_nvml(device: torch.device) -> Nvml | None:
    """Return the reader of a CUDA device's state; None if there is none. The log says why, once per generation."""
    if device.type != "cuda":
        return None
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        logger.info("no clocks and temperatures of GPUs: pip install nvidia-ml-py")
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return None
    try:
        return Nvml(library, str(uuid))
    except library.NVMLError as error:
        logger.info("no clocks and temperatures of GPUs: %s", error)
        return None
