"""The probe detects a faulty device, memory, cache and store of a process."""

import pytest
import torch

from tests.unit.train.helpers import config
from tidewheel.elastic import probe
from tidewheel.errors import StorageAwayError
from tidewheel.storage import LocalStore


def test_a_healthy_process_passes(tmp_path):
    probe.probe(config(tmp_path), "cpu")
    assert not list(tmp_path.rglob(".probe-*"))


def test_a_device_that_multiplies_wrongly_does_not_pass(monkeypatch):
    product = torch.Tensor.__matmul__

    def flipped(left, right):
        result = product(left, right)
        if result.dtype == torch.float32:
            result[17, 3] += 1
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", flipped)
    with pytest.raises(probe.ProbeError, match="1 of 262144 entries"):
        probe.check_arithmetic("cpu")


def test_memory_that_loses_values_does_not_pass(monkeypatch):
    full = torch.full

    def forgetful(*arguments, **named):
        memory = full(*arguments, **named)
        memory[12345] = 0.25
        return memory

    monkeypatch.setattr(torch, "full", forgetful)
    with pytest.raises(probe.ProbeError, match="add up to"):
        probe.check_arithmetic("cpu")


def test_a_cache_that_cannot_be_written_to_does_not_pass(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="file"):
        probe.probe(config(tmp_path, "run", f"data.cache={tmp_path / 'file'}"), "cpu")


def test_unavailable_storage_does_not_pass(tmp_path, monkeypatch):
    def away(self, key):
        raise StorageAwayError("does not answer", where=self.uri)

    monkeypatch.setattr(LocalStore, "exists", away)
    with pytest.raises(StorageAwayError):
        probe.probe(config(tmp_path), "cpu")
