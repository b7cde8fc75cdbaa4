"""Files without names: what is written directly is what the tensor has, and the other way round."""

from __future__ import annotations

import errno
import gc
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidewheel.errors import StorageError
from tidewheel.train.memory import scratch_file
from tidewheel.train.memory.scratch_file import ALIGNMENT, ScratchFile, buffer, empty_like, folder_of

PAGES = 8


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["direct", "tensor"]), st.integers(0, PAGES - 1), st.integers(1, PAGES),
                          st.integers(0, 255)), min_size=1, max_size=8))
def test_both_ways_see_the_same_bytes(tmp_path: Path, operations: list[tuple[str, int, int, int]]):
    file = ScratchFile(tmp_path, PAGES * ALIGNMENT)
    expected = torch.zeros(PAGES * ALIGNMENT, dtype=torch.uint8)
    memory = buffer(PAGES * ALIGNMENT)
    for way, page, count, value in operations:
        start, end = page * ALIGNMENT, min(PAGES, page + count) * ALIGNMENT
        expected[start:end] = value
        if way == "direct":
            memory[:end - start] = value
            file.write(start, memory[:end - start]).wait()
        else:
            file.tensor[start:end] = value
        file.read(0, memory).wait()
        assert torch.equal(memory, expected)
        assert torch.equal(file.tensor, expected)
    file.close()


def test_large_transfers_are_several_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scratch_file, "BLOCK", ALIGNMENT)
    file = ScratchFile(tmp_path, 5 * ALIGNMENT)
    memory = buffer(5 * ALIGNMENT)
    memory.random_(0, 256, generator=torch.Generator().manual_seed(0))
    file.write(0, memory).wait()
    again = buffer(5 * ALIGNMENT)
    file.read(0, again).wait()
    assert torch.equal(memory, again)


def test_the_file_has_no_name_and_its_space_is_freed(tmp_path: Path):
    file = ScratchFile(tmp_path / "deep" / "down", ALIGNMENT)
    assert os.listdir(tmp_path / "deep" / "down") == []
    view = file.tensor[64:128].view(torch.float32)
    assert folder_of(view) == tmp_path / "deep" / "down"
    assert folder_of(torch.zeros(3)) is None
    copy = empty_like(view, tmp_path)
    assert (copy.shape, copy.dtype, folder_of(copy)) == (view.shape, view.dtype, tmp_path)
    file.close()
    del file, view, copy
    gc.collect()
    assert not scratch_file._folders


def test_a_file_system_that_refuses_direct_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     caplog: pytest.LogCaptureFixture):
    original = os.open

    def refused(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
    with caplog.at_level(logging.WARNING):
        file = ScratchFile(tmp_path, ALIGNMENT)
    assert not file.direct
    assert "takes no direct reads and writes (O_DIRECT)" in caplog.text
    memory = buffer(ALIGNMENT)
    memory.fill_(7)
    file.write(0, memory).wait()
    assert torch.equal(file.tensor, memory)


def test_direct_transfers_where_the_file_system_has_them(tmp_path: Path):
    try:
        handle = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no direct transfers")
    os.close(handle)
    assert ScratchFile(tmp_path, ALIGNMENT).direct


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        ScratchFile(tmp_path / "file", ALIGNMENT)
