"""Check Python, the installed packages, torch and Ray.

torch and Ray are imported in processes of their own, at the same time: a broken CUDA driver or a damaged wheel can hang
or crash an import, which is a finding and must not end the doctor.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tidewheel.cluster.doctor.check import Check
from tidewheel.cluster.doctor.gpu import driver_cuda, fits

PROBE_SECONDS = 60.0

TORCH = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
nccl = ".".join(map(str, torch.cuda.nccl.version())) if names and torch.distributed.is_nccl_available() else ""
apart = [i for i in range(1, len(names)) if not torch.cuda.can_device_access_peer(0, i)]
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda, "gpus": names, "nccl": nccl,
                  "apart": apart, "threads": torch.get_num_threads(),
                  "gloo": torch.distributed.is_gloo_available()}))
"""
RAY = """
import json
from tidewheel.errors import TidewheelError
from tidewheel.elastic.ray_contract import KNOWN_RELEASES, check_ray
import ray
problem = fix = ""
try:
    check_ray()
except TidewheelError as error:
    problem, fix = error.what, error.fix
print(json.dumps({"version": ray.__version__, "known": KNOWN_RELEASES, "problem": problem, "fix": fix}))
"""


def python() -> Check:
    """Return the version of Python and the system."""
    return Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def packages() -> Iterator[Check]:
    """Compare the installed versions with the requirements of Tidewheel."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in metadata.requires("tidewheel") or []]
    except metadata.PackageNotFoundError:
        yield Check("packages", "warning", "tidewheel itself is not installed, only on the path",
                    "pip install -e . in the repository, so that its requirements can be checked")
        return
    wrong = []
    met = 0
    for need in requirements:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        version = _version(need.name)
        if version is None or not need.specifier.contains(version, prereleases=True):
            wrong.append((f"{need.name} {version or 'missing'} (needs {need.specifier or 'any'})", str(need)))
        else:
            met += 1
    if wrong:
        yield Check("packages", "failure", "; ".join(text for text, _ in wrong),
                    "pip install " + " ".join(f"'{need}'" for _, need in wrong))
    else:
        yield Check("packages", "ok", f"{met} requirements met")
    moto = _version("moto")
    yield Check("s3 server", "ok", f"moto {moto}") if moto else Check(
        "s3 server", "warning", "moto is missing: `tidewheel demo --storage s3` cannot run",
        "pip install 'tidewheel[demo]' if you want it")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def start(code: str) -> subprocess.Popen[str]:
    """Start a Python process that runs `code`, with this package on its path."""
    package_root = str(Path(__file__).parents[2])
    path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": path})


def _answer(probe: subprocess.Popen[str]) -> tuple[dict, str]:
    """Return what a probe printed, or {} and why it printed nothing."""
    try:
        out, err = probe.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        probe.kill()
        probe.communicate()
        return {}, f"the import did not end within {PROBE_SECONDS:.0f} s"
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if probe.returncode == 0 and lines:
        return json.loads(lines[-1]), ""
    messages = [line for line in err.splitlines() if line.strip()]
    return {}, messages[-1].strip()[:200] if messages else f"the import ended with signal or code {probe.returncode}"


def kernels() -> Check:
    """Check whether the package has machine code of the text kernels for this processor."""
    try:
        from tidewheel.data.text import kernel_objects

        level = kernel_objects.level()
    except ImportError as error:
        return Check("text kernels", "failure", f"cannot be loaded: {error}", "install Tidewheel again in this Python")
    if level is None:
        return Check("text kernels", "warning", "none in the package for this processor: the first pipeline on each "
                     "machine compiles them, a minute or two",
                     "on short-lived machines, set XDG_CACHE_HOME to a lasting folder with mode 0700")
    return Check("text kernels", "ok", f"compiled for {level}")


def torch(probe: subprocess.Popen[str]) -> Check:
    """Check that torch fits the driver and has the libraries for collectives.

    Args:
        probe: process that runs TORCH.
    """
    answer, problem = _answer(probe)
    if not answer:
        return Check("torch", "failure", problem, "pip install --force-reinstall torch, for this Python and driver")
    built = f"built for CUDA {answer['built_for']}" if answer["built_for"] else "built for CPU"
    devices = ", ".join(answer["gpus"]) or "no GPU"
    nccl = f", NCCL {answer['nccl']}" if answer["nccl"] else ""
    detail = f"{answer['version']}, {built}, {devices}{nccl}, {answer['threads']} threads"
    if not answer["gloo"]:
        return Check("torch", "failure", f"{detail}, without gloo", "install a torch build with distributed support")
    driver = driver_cuda()
    if driver and answer["built_for"] and not fits(answer["built_for"], driver):
        return Check("torch", "failure", f"{detail}, but the driver runs CUDA {driver} at most",
                     f"install a torch build for CUDA {driver.partition('.')[0]}, or a newer driver")
    if shutil.which("nvidia-smi") and not answer["gpus"]:
        return Check("torch", "warning", f"{detail}, though this machine has an NVIDIA driver",
                     "install the CUDA build of torch that fits the driver (nvidia-smi shows it)")
    if answer["gpus"] and not answer["nccl"]:
        return Check("torch", "failure", f"{detail}, without NCCL", "install a torch build with NCCL")
    if answer["apart"]:
        return Check("torch", "warning", f"{detail}; GPU 0 cannot reach the memory of GPU "
                     f"{', '.join(map(str, answer['apart']))}", "check PCIe access control (ACS) and the IOMMU")
    return Check("torch", "ok", detail)


def ray(probe: subprocess.Popen[str]) -> Check:
    """Check that elastic training knows the installed Ray.

    Args:
        probe: process that runs RAY.
    """
    answer, problem = _answer(probe)
    if not answer:
        return Check("ray", "failure", problem, "pip install 'ray[default,data,train]' as pinned in constraints.txt")
    if answer["problem"]:
        return Check("ray", "failure", answer["problem"], answer["fix"])
    return Check("ray", "ok", f"{answer['version']}; releases known to work: {', '.join(answer['known'])}")
