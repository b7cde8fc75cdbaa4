"""Machine code under the content of its source: found from any checkout, and not when a line has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tidewheel.data import text
from tidewheel.data.text import address_kernels, kernel_cache, kernel_tools, textpass_kernels

MODULE = """
from tidewheel.data.text.kernel_tools import compiled

@compiled()
def total(x):
    return x.sum() + 1
"""
ASK = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy, probe
print(probe.total(numpy.ones(3)), sum(probe.total.stats.cache_hits.values()))
"""


def ask(folder: Path, cache: Path, source: str = MODULE) -> str:
    """The value of the module's function, and how often its machine code was found."""
    folder.mkdir()
    (folder / "probe.py").write_text(source)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run([sys.executable, "-c", ASK, str(folder)], env=environment, capture_output=True, text=True,
                          check=True).stdout.strip()


def test_the_same_source_elsewhere_is_not_compiled_again_and_another_is(tmp_path: Path):
    cache = tmp_path / "cache"
    assert ask(tmp_path / "a", cache) == "4.0 0"
    assert ask(tmp_path / "b", cache) == "4.0 1"
    assert ask(tmp_path / "c", cache, MODULE.replace("+ 1", "+ 2")) == "5.0 0"
    assert ask(tmp_path / "d", cache) == "4.0 1"
    assert (cache / "tidewheel/kernels").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shared = tmp_path / "tidewheel/kernels"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "own"))
    found = kernel_cache.folder.__wrapped__()
    assert found == tmp_path / f"own/tidewheel-{os.getuid()}/kernels"
    found.parent.chmod(0o770)
    assert kernel_cache.folder.__wrapped__() is None
    dispatcher = kernel_tools.numba.njit(lambda x: x + 1)
    monkeypatch.setattr(kernel_cache, "folder", lambda: None)
    kernel_cache.keep(dispatcher, [Path(__file__)])
    assert dispatcher(1) == 2  # compiled, and not kept
    assert not kernel_cache.is_kept(dispatcher)


def test_old_machine_code_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_cache, "folder", lambda: tmp_path)
    for name, age in (("old.nbc", kernel_cache.KEPT_SECONDS + 60), ("new.nbc", 60)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, (tmp_path / name).stat().st_mtime - age))
    kernel_cache.forget_old()
    assert [path.name for path in tmp_path.iterdir()] == ["new.nbc"]


def test_a_pass_depends_on_the_files_of_what_it_calls(tmp_path: Path):
    text.warm_up()
    assert text.is_warm()
    kept = textpass_kernels.scan._cache._cache_file._source_stamp
    files = [Path(module.__file__) for module in (kernel_tools, textpass_kernels, address_kernels)]
    assert len({*stamps(files, tmp_path), kept}) == len(files) + 2


def stamps(files: list[Path], folder: Path) -> list[str]:
    """The stamp of a function over these files, and with a line more in each."""
    found = []
    for changed in (None, *files):
        copies = []
        for file in files:
            copy = folder / file.name
            shutil.copy(file, copy)
            if file == changed:
                copy.write_text(copy.read_text() + "# more\n")
            copies.append(copy)
        dispatcher = kernel_tools.numba.njit(lambda x: x)
        kernel_cache.keep(dispatcher, copies)
        found.append(dispatcher._cache._cache_file._source_stamp)
    return found
