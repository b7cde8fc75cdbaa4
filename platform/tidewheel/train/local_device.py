"""The device of a program that works on one device without a cluster."""

from __future__ import annotations

import torch

from tidewheel.errors import ConfigError
from tidewheel.train.cuda_environment import prepare_environment


def local_device(name: str = "") -> torch.device:
    """Return a device of this machine, ready for use.

    Args:
        name: "cpu", "cuda" or "cuda:1"; "" for the first GPU, or the CPU without one.

    Raises:
        ConfigError: the name is none, or this machine has no such device.
    """
    if not name:
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{name!r} is not a device", where="device", fix="give cpu, cuda or cuda:1") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"{name!r} is neither a CPU nor an NVIDIA GPU", where="device",
                          fix="give cpu, cuda or cuda:1")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        gpus = f"{count or 'no'} GPU{'s' if count > 1 else ''}"
        raise ConfigError(f"this machine has {gpus} that torch can use, so there is no {name}", where="device",
                          fix="leave it out, or give cpu; `tidewheel doctor` says why torch does not find a GPU")
    device = torch.device("cuda", device.index or 0)
    prepare_environment()
    torch.cuda.set_device(device)
    return device


def describe(device: torch.device) -> str:
    """Return a device and its product, for people."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "the CPU"
