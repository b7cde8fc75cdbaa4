"""What is missing or wrong on this machine, and how to mend it: `tidewheel doctor`.

torch and Ray are asked in processes of their own, side by side: a broken CUDA driver or a half-installed
wheel can hang or crash an import, and that is a finding, not an end of the examination.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from tidewheel.errors import TidewheelError
from tidewheel.storage import store

PROBE_SECONDS = 60.0
PROBE_BYTES = 8 << 20  # enough to see a bandwidth, little enough to wait for
MIN_MEMORY, MIN_SHM, MIN_DISK, MIN_FILES = 4 << 30, 1 << 30, 5 << 30, 4096
SPILL_LIMIT = 0.95  # Ray stops writing to a disk that is fuller than this (local_fs_capacity_threshold)

_TORCH = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda, "gpus": names,
                  "threads": torch.get_num_threads(), "gloo": torch.distributed.is_gloo_available()}))
"""
_RAY = """
import json
from tidewheel.errors import TidewheelError
from tidewheel.elastic.ray_contract import check_ray
import ray
problem = mend = ""
try:
    check_ray()
except TidewheelError as error:
    problem, mend = error.what, error.mend
print(json.dumps({"version": ray.__version__, "problem": problem, "mend": mend}))
"""


@dataclass(frozen=True)
class Check:
    """One finding; `mend` is empty when there is nothing to mend."""

    name: str
    status: Literal["ok", "warning", "failure"]
    detail: str
    mend: str = ""


def diagnose(storage: str | None = None) -> list[Check]:
    """Examine this machine, and with `storage` also writing, reading, listing and deleting at that URI.

    Never raises for what it examines: a problem is a `Check` with status "failure".
    """
    probes = {name: _start(code) for name, code in (("torch", _TORCH), ("ray", _RAY))}
    checks = [_python(), *_packages(), _cpus(), _memory(), _shared_memory(), _open_files(), *_disks(), _loopback(),
              *_proxy(), *_ray_address(), _torch(probes["torch"]), _ray(probes["ray"])]
    return checks + (_storage(storage) if storage else [])


# -- software ----------------------------------------------------------------------------------


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Iterator[Check]:
    """Installed versions against what our own package asks for."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in metadata.requires("tidewheel") or []]
    except metadata.PackageNotFoundError:
        yield Check("packages", "warning", "tidewheel itself is not installed, only on the path",
                    "pip install -e . in the repository, so that its requirements can be checked")
        return
    wrong, good = [], 0
    for need in wanted:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        version = _version(need.name)
        if version is None or not need.specifier.contains(version, prereleases=True):
            wrong.append((f"{need.name} {version or 'missing'} (needs {need.specifier or 'any'})", str(need)))
        else:
            good += 1
    if wrong:
        yield Check("packages", "failure", "; ".join(text for text, _ in wrong),
                    "pip install " + " ".join(f"'{need}'" for _, need in wrong))
    else:
        yield Check("packages", "ok", f"{good} requirements met")
    moto = _version("moto")
    yield Check("s3 server", "ok", f"moto {moto}") if moto else Check(
        "s3 server", "warning", "moto is missing: `tidewheel demo --storage s3` cannot run",
        "pip install 'tidewheel[demo]' if you want it")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _start(code: str) -> subprocess.Popen[str]:
    here = str(Path(__file__).parents[2])  # so that the child finds this very package
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": path})


def _answer(probe: subprocess.Popen[str]) -> tuple[dict, str]:
    """What the probe printed, or {} and why it printed nothing."""
    try:
        out, err = probe.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        probe.kill()
        probe.communicate()
        return {}, f"the import did not end within {PROBE_SECONDS:.0f} s"
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if probe.returncode == 0 and lines:
        return json.loads(lines[-1]), ""
    said = [line for line in err.splitlines() if line.strip()]
    return {}, said[-1].strip()[:200] if said else f"the import ended with signal or code {probe.returncode}"


def _torch(probe: subprocess.Popen[str]) -> Check:
    found, problem = _answer(probe)
    if not found:
        return Check("torch", "failure", problem, "pip install --force-reinstall torch, for this Python and driver")
    built = f"built for CUDA {found['built_for']}" if found["built_for"] else "built for CPU"
    devices = ", ".join(found["gpus"]) or "no GPU"
    detail = f"{found['version']}, {built}, {devices}, {found['threads']} threads"
    if not found["gloo"]:
        return Check("torch", "failure", f"{detail}, without gloo", "install a torch build with distributed support")
    if shutil.which("nvidia-smi") and not found["gpus"]:
        return Check("torch", "warning", f"{detail}, though this machine has an NVIDIA driver",
                     "install the CUDA build of torch that fits the driver (nvidia-smi shows it)")
    return Check("torch", "ok", detail)


def _ray(probe: subprocess.Popen[str]) -> Check:
    found, problem = _answer(probe)
    if not found:
        return Check("ray", "failure", problem, "pip install 'ray[default,data,train]' as pinned in constraints.txt")
    if found["problem"]:
        return Check("ray", "failure", found["problem"], found["mend"])
    return Check("ray", "ok", f"{found['version']}, supported by the elastic adapter")


# -- machine -----------------------------------------------------------------------------------


def _cpus() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpus()
    detail = f"{usable} usable" + (f", a quota of {quota:.1f}" if quota and quota < usable else "")
    if min(usable, quota or usable) < 2:
        return Check("cpus", "warning", detail, "the demo wants two: it still runs with one, slowly")
    return Check("cpus", "ok", detail)


def _cgroup_cpus() -> float | None:
    """CPUs a container may use, None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        total = min(total, int(limit)) if limit != "max" else total
    except (OSError, ValueError):
        pass  # no cgroup v2 here: the machine's memory is the limit
    if total < MIN_MEMORY:
        return Check("memory", "warning", f"{_size(total)}: Ray kills workers when memory is full",
                     f"give this machine or container {_size(MIN_MEMORY)} or more")
    return Check("memory", "ok", _size(total))


def _shared_memory() -> Check:
    if not Path("/dev/shm").is_dir():
        return Check("shared memory", "ok", "no /dev/shm on this system")
    total = shutil.disk_usage("/dev/shm").total
    if total < MIN_SHM:
        return Check("shared memory", "warning", f"/dev/shm has {_size(total)}: Ray's object store falls back to disk",
                     "start the container with --shm-size=4g, or mount a larger tmpfs at /dev/shm")
    return Check("shared memory", "ok", f"/dev/shm has {_size(total)}")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < MIN_FILES:
        return Check("open files", "warning", f"limit {soft}", f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}")
    return Check("open files", "ok", f"limit {soft}")


def _disks() -> Iterator[Check]:
    for name, path in (("temporary disk", tempfile.gettempdir()), ("working disk", str(Path.cwd()))):
        usage = shutil.disk_usage(path)
        detail = f"{_size(usage.free)} free at {path}"
        full = 1 - usage.free / usage.total
        if usage.free < MIN_DISK / 5:
            yield Check(name, "failure", detail, "free some space, or set TMPDIR to a larger disk")
        elif usage.free < MIN_DISK or full > SPILL_LIMIT:
            yield Check(name, "warning", f"{detail}, {full:.0%} full",
                        f"free some space: Ray refuses to spill to a disk that is more than {SPILL_LIMIT:.0%} full")
        else:
            yield Check(name, "ok", detail)


# -- network and Ray ---------------------------------------------------------------------------


def _loopback() -> Check:
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(2)
            client.connect(server.getsockname())
    except OSError as error:
        return Check("loopback", "failure", f"cannot open a port on 127.0.0.1 ({error.strerror})",
                     "allow loopback connections: Ray's processes talk over them")
    return Check("loopback", "ok", "ports can be opened on 127.0.0.1")


def _proxy() -> Iterator[Check]:
    names = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(name)]
    if names:
        spared = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        if not {"127.0.0.1", "localhost", "*"} & {part.strip() for part in spared.split(",")}:
            yield Check("proxy", "warning", f"{names[0]} is set and NO_PROXY does not spare this machine",
                        "export NO_PROXY=127.0.0.1,localhost")


def _ray_address() -> Iterator[Check]:
    """A RAY_ADDRESS that nothing answers at is the most common reason why Ray does not start."""
    address = os.environ.get("RAY_ADDRESS", "")
    if not address or address == "local":
        yield Check("RAY_ADDRESS", "ok", "not set: a private cluster is started when one is needed")
    elif address == "auto":
        yield Check("RAY_ADDRESS", "ok", "auto: joins the cluster that runs on this machine")
    elif _answers(address):
        yield Check("RAY_ADDRESS", "ok", f"{address} answers: commands run on that cluster")
    else:
        yield Check("RAY_ADDRESS", "failure", f"nothing answers at {address}",
                    "unset RAY_ADDRESS, or start the cluster it names")


def _answers(address: str) -> bool:
    host, _, port = address.partition("://")[2].partition("/")[0].rpartition(":") if "://" in address else (
        address.rpartition(":"))
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.5).close()
    except (OSError, ValueError):
        return False
    return True


# -- storage -----------------------------------------------------------------------------------


def _storage(uri: str) -> list[Check]:
    """Write, read back, list and delete an object below the URI."""
    folder = f".tidewheel-doctor-{uuid.uuid4().hex}"
    key = f"{folder}/probe"
    data = os.urandom(PROBE_BYTES)
    doing = "reached"
    try:
        place = store(uri)
        place.check()
        try:
            doing = "written"
            began = time.monotonic()
            stamp = place.write(key, data)
            wrote = time.monotonic()
            doing = "read"
            same = place.read(key) == data
            read = time.monotonic()
            doing = "listed"
            listed = [entry.key for entry in place.list(folder)]
        finally:
            if doing != "written":
                place.delete_tree(folder)
    except TidewheelError as error:
        return [Check("storage", "failure", f"{uri} cannot be {doing}: {error.what}", error.mend)]
    except Exception as error:
        return [Check("storage", "failure", f"{uri} cannot be {doing}: {type(error).__name__}: {error}"[:300],
                      "check the URI, the AWS_* variables and the store's own health")]
    if not same or key not in listed:
        return [Check("storage", "failure", f"{uri} does not return what was written to it",
                      "use a store with read-after-write consistency")]
    speed = f"write {stamp.bytes / (wrote - began) / 1e6:.0f} MB/s, read {stamp.bytes / (read - wrote) / 1e6:.0f} MB/s"
    return [Check("storage", "ok", f"{uri}: written, read back, listed, deleted; {speed}")]


def _size(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
