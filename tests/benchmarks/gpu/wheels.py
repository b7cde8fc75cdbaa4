"""Wheels of the packages that a machine with a GPU but without network may lack.

    python -m tests.benchmarks.gpu.wheels [--python-version 3.12]

Downloads them to .wheels/VERSION in the root of the repository (`make gpu-wheels`). Copy the folder to the machine with
the repository: `python -m tests.benchmarks.gpu` installs from it what cannot be imported there. torch, triton, numpy,
transformers, pyarrow, pytest and the like must be there already; README.md lists them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".wheels"
LIMIT = 60 * 2**20
"""Bytes: such a machine takes a copy of the repository with its wheels of at most 64 MiB."""
MODULES = {
    "pydantic": "pydantic", "pydantic_core": "pydantic-core", "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection", "blake3": "blake3", "torchao": "torchao==0.18.0",
    "torchtitan": "torchtitan==0.2.2", "torchdata": "torchdata==0.11.0", "datasets": "datasets==4.4.1",
    "dill": "dill==0.4.0", "multiprocess": "multiprocess==0.70.18", "tyro": "tyro==1.0.17",
    "docstring_parser": "docstring-parser==0.18.0", "typeguard": "typeguard==4.6.0", "tomli": "tomli==2.5.0"}
"""Module: what to download. Those that constraints.txt names get its version. The others are torchtitan's."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64", "manylinux1_x86_64")


def requirements() -> list[str]:
    """Return the requirements, each with one version if the repository pins it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("#")[0].strip().split("==") for line in lines if "==" in line.split("#")[0])
    normal = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    return [name if "==" in name else f"{name}=={normal[name]}" if name in normal else name
            for name in MODULES.values()]


def download(python_version: str) -> Path:
    """Download the wheels for a version of Python on x86-64 Linux, and return their folder.

    Raises:
        RuntimeError: a package cannot be downloaded, or the folder is too large.
    """
    folder = FOLDER / python_version
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()  # pip refuses two versions of a package
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    for requirement in requirements():
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version",
             python_version, "--implementation", "cp", *platforms, "-d", str(folder), requirement],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"{requirement} cannot be downloaded as a wheel for Python {python_version}, x86-64 "
                               f"Linux; pip says: {done.stdout.strip()[-500:]}")
    check_size(folder)
    return folder


def check_size(folder: Path) -> int:
    """Return the bytes of a folder's wheels.

    Raises:
        RuntimeError: they are more than `LIMIT`.
    """
    size = sum(file.stat().st_size for file in folder.glob("*.whl"))
    if size >= LIMIT:
        raise RuntimeError(f"{folder} has {size / 2**20:.1f} MiB, but {LIMIT / 2**20:.0f} MiB are the limit: shorten "
                           "MODULES in tests/benchmarks/gpu/wheels.py")
    return size


def install() -> str | None:
    """Install the wheels of modules that cannot be imported here; return the folder to import them from.

    Returns:
        None if there is nothing to install.

    Raises:
        RuntimeError: pip refuses a wheel.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    files = [wheel for module, requirement in MODULES.items() if importlib.util.find_spec(module) is None
             for wheel in _wheels(FOLDER / version, requirement)]
    if not files:
        return None
    target = tempfile.mkdtemp(prefix="tidewheel-wheels-")
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile",
                           "--target", target, *map(str, files)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)
    if done.returncode:
        raise RuntimeError(f"the wheels in {FOLDER / version} cannot be installed; pip says: {done.stdout[-500:]}")
    return target


def _wheels(folder: Path, requirement: str) -> Sequence[Path]:
    name = requirement.split("==")[0].replace("-", "_")
    return sorted(folder.glob(f"{name}-*.whl"))


def main() -> int:
    """Download, and say how large the folder is."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--python-version", default="3.12", help="of the machine with the GPU")
    options = arguments.parse_args()
    try:
        folder = download(options.python_version)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    wheels = list(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{os.path.relpath(folder)}: {len(wheels)} wheels, {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
