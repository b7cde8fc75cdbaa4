"""Cached machine code is found from any checkout, and not after a change of its source."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tidewheel.data.text import kernel_cache, kernel_tools

MODULE = """
import numba
from tidewheel.data.text.kernel_tools import compiled

MORE = 1

@numba.njit
def added(x):
    return x + MORE

@compiled
def total(x):
    return added(x.sum())
"""
ASK = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy, probe
print(probe.total(numpy.ones(3)), sum(probe.total.dispatcher.stats.cache_hits.values()))
"""


def start(folder: Path, cache: Path, source: str = MODULE) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "probe.py").write_text(source)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", ASK, str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def ask(folder: Path, cache: Path, source: str = MODULE) -> str:
    """Return the value of the module's function, and the number of cache hits."""
    process = start(folder, cache, source)
    output = process.communicate()[0].strip()
    assert process.returncode == 0
    return output


def test_only_a_changed_source_is_compiled_again(tmp_path: Path):
    cache = tmp_path / "cache"
    assert ask(tmp_path / "a", cache) == "4.0 0"
    assert ask(tmp_path / "b", cache, MODULE + "\n# a remark beside the functions\n") == "4.0 1"
    assert ask(tmp_path / "c", cache, MODULE.replace("x + MORE", "x + MORE + MORE")) == "5.0 0"
    assert ask(tmp_path / "d", cache, MODULE.replace("MORE = 1", "MORE = 3")) == "6.0 0"
    assert ask(tmp_path / "e", cache) == "4.0 1"
    assert (cache / "tidewheel/kernels").stat().st_mode & 0o777 == 0o700


def test_only_one_of_two_concurrent_processes_compiles(tmp_path: Path):
    both = [start(tmp_path / name, tmp_path / "cache") for name in ("a", "b")]
    assert sorted(process.communicate()[0].strip() for process in both) == ["4.0 0", "4.0 1"]


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shared = tmp_path / "tidewheel/kernels"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "own"))
    result = kernel_cache.folder.__wrapped__()
    assert result == tmp_path / f"own/tidewheel-{os.getuid()}/kernels"
    result.parent.chmod(0o770)
    assert kernel_cache.folder.__wrapped__() is None
    dispatcher = kernel_tools.numba.njit(lambda x: x + 1)
    monkeypatch.setattr(kernel_cache, "folder", lambda: None)
    kernel_cache.keep(dispatcher, "abc")
    assert dispatcher(1) == 2  # compiled, and not kept
    assert not kernel_cache.is_kept(dispatcher)


def test_old_machine_code_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_cache, "folder", lambda: tmp_path)
    for name, age in (("old.nbc", kernel_cache.KEPT_SECONDS + 60), ("new.nbc", 60)):
        (tmp_path / name).touch()
        written = time.time() - age
        os.utime(tmp_path / name, (written, written))
    kernel_cache.forget_old()
    assert [path.name for path in tmp_path.iterdir()] == ["new.nbc"]
