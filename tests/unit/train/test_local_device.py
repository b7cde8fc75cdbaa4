"""The device of programs that work without a cluster. GPUs are pretended, so that the choice is tested here."""

from __future__ import annotations

import os

import pytest
import torch

from tidewheel.errors import ConfigError
from tidewheel.train.cuda_environment import ERROR_HANDLING
from tidewheel.train.local_device import describe, local_device


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that pretends that this machine has so many GPUs; it gives the list of chosen ones."""
    current: list[torch.device] = []
    monkeypatch.delenv(ERROR_HANDLING, raising=False)

    def pretend(count: int) -> list[torch.device]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
        return current

    return pretend


def test_the_first_gpu_is_the_default(gpus):
    current = gpus(2)
    device = local_device()
    assert current == [device] == [torch.device("cuda:0")]
    assert os.environ[ERROR_HANDLING] == "0"
    assert describe(device) == "cuda:0 (GPU 0)"


def test_without_a_gpu_the_default_is_the_cpu(gpus):
    assert gpus(0) == []
    assert local_device() == torch.device("cpu")
    assert describe(torch.device("cpu")) == "the CPU"
    assert ERROR_HANDLING not in os.environ


@pytest.mark.parametrize(("name", "chosen"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_named_device_is_taken(gpus, name, chosen):
    gpus(2)
    assert local_device(name) == torch.device(chosen)


@pytest.mark.parametrize(("name", "count", "reason"), [
    ("cuda", 0, "this machine has no GPU that torch can use, so there is no cuda"),
    ("cuda:2", 2, "this machine has 2 GPUs that torch can use, so there is no cuda:2"),
    ("gpu", 1, "'gpu' is not a device"),
    ("meta", 1, "'meta' is neither a CPU nor an NVIDIA GPU")])
def test_a_device_that_is_not_there_is_refused(gpus, name, count, reason):
    gpus(count)
    with pytest.raises(ConfigError, match=reason):
        local_device(name)
