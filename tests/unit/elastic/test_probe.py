"""The probe detects a faulty device, memory, cache and store of a process."""

import hashlib

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


def test_the_known_hash_is_that_of_the_product():
    left = torch.arange(probe.SIZE).reshape(-1, 1) + 2 * torch.arange(probe.SIZE)
    right = 3 * torch.arange(probe.SIZE).reshape(-1, 1) + torch.arange(probe.SIZE)
    entries = (left % 7 @ (right % 5)).to(torch.int32).numpy().astype("<i4")
    assert hashlib.sha256(entries.tobytes()).hexdigest() == probe.PRODUCT_HASH


def test_a_node_passes_at_the_start_while_storage_is_away(tmp_path, monkeypatch):
    def away(self, key):
        raise StorageAwayError("does not answer", where=self.uri)

    monkeypatch.setattr(LocalStore, "exists", away)
    probe.at_start(config(tmp_path), "cpu")


def test_a_wrong_cache_setting_is_no_fault_of_the_node(tmp_path):
    (tmp_path / "file").write_text("no folder")
    probe.at_start(config(tmp_path, "run", f"data.cache={tmp_path / 'file'}"), "cpu")


def test_a_disk_that_loses_what_is_written_does_not_pass_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda self: b"other")
    with pytest.raises(probe.ProbeError, match="does not hold what was written"):
        probe.at_start(config(tmp_path), "cpu")
