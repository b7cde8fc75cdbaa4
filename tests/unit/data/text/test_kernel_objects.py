"""Machine code in the package is current, gives the same bits at each level, and needs no compilation."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llvmlite import binding

from tidewheel.data import kernel_build
from tidewheel.data.text import kernel_objects, kernel_source, kernel_tools, line_kernels

pytestmark = pytest.mark.skipif(kernel_objects.level() is None, reason="nothing comes for this processor")
USE = """
import json, hashlib, sys
from numba.core import event

class Count(event.Listener):
    found = 0
    def on_start(self, event):
        Count.found += 1
    def on_end(self, event):
        pass

event.register("numba:compile", Count())
from tests.filtering import everything, judged
from tidewheel.data import warm_up
from tidewheel.data.dedup import minhash
from tidewheel.data.filters.refinedweb import RefinedWeb
from tidewheel.data import textpass
from tidewheel.data.text import kernel_objects

ready = warm_up.is_warm()
warm_up.warm_up()
texts = json.load(open(sys.argv[1]))
found = textpass.measure(texts, everything(), minhash=(5, 112, 1), hashes=True)
reasons, statistics, rest = judged(texts, RefinedWeb())
digest = hashlib.sha256()
for part in (found.tokens, found.token_counts, found.repetition, found.line_counts, found.kept_lines, found.hashes,
             found.signatures, found.shingles, minhash.minhash(texts, unit="characters").signatures):
    digest.update(part.tobytes())
digest.update(json.dumps([found.edited.to_pylist(), reasons, [each.tolist() for each in statistics.values()],
                          rest.to_pylist()]).encode())
print(json.dumps({"level": kernel_objects.level(), "ready": ready, "compiled": Count.found,
                  "bits": digest.hexdigest()}))
"""


def texts() -> list[str]:
    """Texts with all kinds of words, lines, marks and scripts, some of them repeated."""
    rng = np.random.default_rng(7)
    words = ["the", "Web", "cookies", "policy", "3.14", "e-mail", "naïve", "東京", "ภาษา", "ёлка", "[12]", "{", "...",
             "http://a.example/x?y", "U.S.", "can't", "lorem", "ipsum", "\u00ad", "\r\n", "•", "a" * 70, "😀"]
    return ["", " ", *("".join(rng.choice(words) + rng.choice([" ", " ", " ", "\n", "\t"]) for _ in range(size))
                       for size in rng.integers(1, 600, 60))]


def start(tmp_path: Path, level: str = "") -> subprocess.Popen[str]:
    """Start a process that has its own kernel cache and uses all kernels."""
    (tmp_path / "texts.json").write_text(json.dumps(texts()))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), kernel_objects.SETTING: level}
    return subprocess.Popen([sys.executable, "-c", USE, str(tmp_path / "texts.json")], env=environment,
                            stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict:
    """Wait for a process and return what it printed."""
    output = process.communicate()[0]
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def test_the_machine_code_in_the_package_is_current():
    assert kernel_build.stale() == [], "run `python -m tidewheel.data.kernel_build`"


def test_two_processes_of_a_new_machine_compile_nothing(tmp_path: Path):
    both = [start(tmp_path), start(tmp_path)]
    results = [result(process) for process in both]
    assert [(values["ready"], values["compiled"]) for values in results] == [(True, 0), (True, 0)]
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_each_level_gives_the_same_bits(tmp_path: Path):
    features = {name for name, has in binding.get_host_cpu_features().items() if has}
    usable_levels = [level for level in kernel_objects.LEVELS if kernel_objects.required(level) <= features]
    results = [result(start(tmp_path, level)) for level in usable_levels]
    assert [values["level"] for values in results] == usable_levels
    assert len({values["bits"] for values in results}) == 1


def test_a_level_has_the_features_of_those_below_it():
    sizes = [len(kernel_objects.required(level)) for level in kernel_objects.LEVELS]
    assert sizes == sorted(sizes, reverse=True)
    assert kernel_objects.required("x86-64-v2") < kernel_objects.required("x86-64-v3")


def test_machine_code_of_another_source_is_not_loaded():
    kernel = line_kernels.line_hashes
    assert kernel_objects.forms(kernel.name, kernel.digest)
    assert kernel_objects.forms(kernel.name, kernel.digest[::-1]) == ()
    assert kernel_objects.forms("tidewheel.nothing", kernel.digest) == ()


def test_arguments_of_other_types_do_not_fit_a_form():
    name = "tidewheel.data.dedup.minhash._common"
    (form,) = kernel_tools.KERNELS[name].forms
    values = np.arange(4, dtype=np.uint32)
    assert form.pack([values, values]) is not None
    assert form.pack([values, values.astype(np.int64)]) is None
    assert form.pack([values[::2], values]) is None  # not contiguous
    assert form.pack([values]) is None
    assert form.pack([values, 3]) is None
    assert form.call(form.pack([values, values[1:]]) or []) == 3


def test_the_digest_depends_on_everything_the_code_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = kernel_source.digest(line_kernels.line_hashes.py_func)
    assert kernel_source.digest(line_kernels.line_hashes.py_func) == before
    monkeypatch.setattr(line_kernels, "START", 5)
    assert kernel_source.digest(line_kernels.line_hashes.py_func) != before
    monkeypatch.undo()
    monkeypatch.setattr(kernel_tools, "MULTIPLIER", np.uint64(3))  # of `absorb`, which `hash_bytes` calls
    assert kernel_source.digest(line_kernels.line_hashes.py_func) != before
    monkeypatch.setattr(line_kernels, "START", [1])
    with pytest.raises(TypeError, match="START"):
        kernel_source.digest(line_kernels.line_hashes.py_func)


def test_the_digest_does_not_depend_on_the_order_of_names(monkeypatch: pytest.MonkeyPatch):
    function = line_kernels.repetition_counts.py_func
    before, names = kernel_source.digest(function), kernel_source._names
    monkeypatch.setattr(kernel_source, "_names", lambda code: reversed(list(names(code))))
    assert kernel_source.digest(function) == before


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_building_again_gives_the_same_files(tmp_path: Path):
    for name in kernel_objects.LEVELS:
        made = kernel_objects.read(kernel_objects.path(name))[0]["made"]
        if any(importlib.metadata.version(package) != version for package, version in made.items()):
            pytest.skip(f"{name} was compiled with {made}")
    subprocess.run([sys.executable, "-m", "tidewheel.data.kernel_build", "--folder", str(tmp_path)], check=True)
    for name in kernel_objects.LEVELS:
        assert (tmp_path / kernel_objects.path(name).name).read_bytes() == kernel_objects.path(name).read_bytes()
