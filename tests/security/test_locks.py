"""Locks with hashes are made from pip's report, and where a lock exists, installations use only its files.

`make -n` prints the commands, so these tests need neither a network nor a container engine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.security import dependencies
from tests.security.dependencies import ROOT, TARGETS


def item(name: str, digest: str = "ab" * 32) -> dict[str, Any]:
    return {"metadata": {"name": name, "version": "2.60.0"},
            "download_info": {"archive_info": {"hashes": {"sha256": digest} if digest else {}}}}


def test_a_lock_has_a_hash_for_each_package_and_not_this_checkout():
    ours = {"metadata": {"name": "tidewheel", "version": "0.1.0"}, "download_info": {"dir_info": {}}}
    text = dependencies.lock({"install": [item("Ray"), ours]}, "https://example.org/simple")
    assert text.splitlines()[2:] == ["--extra-index-url https://example.org/simple", "ray==2.60.0 \\",
                                     f"    --hash=sha256:{'ab' * 32}"]
    with pytest.raises(ValueError, match="no SHA-256"):
        dependencies.lock({"install": [item("ray", "")]})


def test_a_lock_has_all_installed_packages_and_the_build_packages(monkeypatch):
    """A list of pins would lack packages that a platform needs too, such as the CUDA libraries of torch."""
    arguments: list[str] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        arguments.extend(command)
        return subprocess.CompletedProcess(command, 0, '{"install": []}')

    monkeypatch.setattr(dependencies.subprocess, "run", pip)
    dependencies.report(TARGETS["cpu"])
    assert {f"{ROOT}[tokenizers,classify,web]", "boto3", "editables", TARGETS["cpu"].index} <= set(arguments)
    assert any(word.startswith("hatchling==") for word in arguments)
    assert "--no-deps" not in arguments
    assert "-r" not in arguments


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copy2(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    return tmp_path


def would_run(folder: Path) -> list[str]:
    """Return the commands of `make install`, without the settings of the `make` that runs these tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    process = subprocess.run(["make", "-n", "install", f"PYTHON={sys.executable}"], cwd=folder, env=environment,
                          capture_output=True, text=True, check=True)
    return process.stdout.splitlines()


def test_make_install_without_a_lock_uses_the_pinned_versions(checkout: Path):
    environment, packages = [line for line in would_run(checkout) if " -m pip " in line or " -m venv " in line]
    assert "--clear" not in environment
    assert packages.endswith('install -c constraints.txt -e ".[dev]"')


def test_make_install_with_a_lock_installs_only_files_with_its_hashes(checkout: Path):
    (checkout / "requirements.lock").touch()
    lines = [line for line in would_run(checkout) if " -m pip " in line or " -m venv " in line]
    environment, packages, ours, check = lines
    assert " --clear " in environment  # pip does not hash packages that are already installed
    assert packages.endswith(" install --require-hashes --no-deps -r requirements.lock")
    assert ours.endswith(" install --no-deps --no-build-isolation -e .")  # or pip would download build packages
    assert " check || " in check  # fails if a package is missing from the lock


def test_only_a_changed_lock_is_installed_again(checkout: Path):
    (checkout / "requirements.lock").touch()
    stamp = checkout / ".venv/.installed"
    stamp.parent.mkdir()
    stamp.touch()
    for name in ("pyproject.toml", "constraints.txt", "requirements.lock"):
        os.utime(checkout / name, (1, 1))
    assert not any(" -m pip " in line for line in would_run(checkout))
    later = stamp.stat().st_mtime + 1
    os.utime(checkout / "requirements.lock", (later, later))
    assert any(" --require-hashes " in line for line in would_run(checkout))


def pins(text: str) -> dict[str, str]:
    """Return {name: version} of the lines `name==version`: names normalised, versions without a local tag."""
    matches = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;+]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in matches}


def test_the_lock_of_continuous_integration_has_the_pinned_versions():
    """If constraints.txt changed after `make lock`, CI would test other versions than users install."""
    text = (ROOT / TARGETS["ci"].file).read_text()
    locked, pinned = pins(text), pins((ROOT / "constraints.txt").read_text())
    assert {name: version for name, version in locked.items() if name in pinned} == {
        name: version for name, version in pinned.items() if name in locked}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    requirements = [*project["project"]["dependencies"], *extras["dev"], *project["build-system"]["requires"]]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", line)[0]).lower() for line in requirements}
    assert names - {dependencies.OURS} <= set(locked)
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)) == len(locked)


@pytest.mark.parametrize("fits", [True, False])
def test_continuous_integration_installs_from_its_lock(tmp_path: Path, fits: bool):
    """Run the real script with a `make` that prints its arguments."""
    (tmp_path / "bin").mkdir()
    make = tmp_path / "bin/make"
    make.write_text("#!/bin/sh\necho made: \"$@\"\n")
    make.chmod(0o755)
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    (tmp_path / ".ci").mkdir()
    shutil.copy2(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / ".ci/requirements.lock").write_text(f"# {dependencies.tag() if fits else 'cpython-27 vax'}\n")
    process = subprocess.run([tmp_path / ".ci/run"], env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
                          capture_output=True, text=True, check=True)
    assert process.stdout == ("made: test LOCK=.ci/requirements.lock\n" if fits else "made: test\n")
    assert ("without hashes" in process.stderr) is not fits


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_is_built_from_its_lock_when_there_is_one(target: str):
    text = (ROOT / "cluster/Dockerfile").read_text()
    stage = re.search(rf"^FROM build AS build-{target}$(.*?)^FROM ", text, re.MULTILINE | re.DOTALL)
    assert stage is not None
    lines = re.sub(r"\\\n\s*", "", stage.group(1)).splitlines()
    lock = TARGETS[target].file
    assert f"COPY constraints.txt {lock[:-1]}[k] ./" in lines  # a pattern, so that the file may be absent
    packages, ours = [line for line in lines if line.startswith("RUN ")]
    choice = re.compile(rf"RUN if \[ -e {lock} \]; then (.*); else (.*); fi")
    with_lock = [match.group(1) for match in map(choice.fullmatch, (packages, ours)) if match]
    assert with_lock == [f"pip install --require-hashes --no-deps -r {lock}",
                         "pip install --no-deps --no-build-isolation . && pip check"]
    assert f'".[{",".join(TARGETS[target].extras)}]" {" ".join(TARGETS[target].more)}; fi' in ours
    assert TARGETS[target].index in packages
    assert f"!{lock}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_list_of_arguments_is_checked(capsys):
    assert dependencies.main(["lock", "nowhere"]) == 2
    assert "requirements.lock" in capsys.readouterr().out
