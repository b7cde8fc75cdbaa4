"""Check the machine: CPUs, memory, shared memory, limits, disks."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tidewheel.cluster.doctor.check import Check, size

MIN_MEMORY, MIN_SHM, MIN_DISK, MIN_FILES, MIN_PROCESSES = 4 << 30, 1 << 30, 5 << 30, 4096, 4096
MIN_LOCKED = 1 << 30
INFINIBAND = "/dev/infiniband"
SPILL_LIMIT = 0.95
"""Ray does not spill to a disk that is fuller than this share (local_fs_capacity_threshold)."""


def cpus() -> Check:
    """Check that this process may use two CPUs."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpus()
    detail = f"{usable} usable" + (f", a quota of {quota:.1f}" if quota and quota < usable else "")
    if min(usable, quota or usable) < 2:
        return Check("cpus", "warning", detail, "the demo needs two CPUs to run at full speed")
    return Check("cpus", "ok", detail)


def _cgroup_cpus() -> float | None:
    """Return the CPUs that a container may use; None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def memory() -> Check:
    """Check the memory of the machine or the container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        total = min(total, int(limit)) if limit != "max" else total
    except (OSError, ValueError):
        pass  # no cgroup v2 here: the machine's memory is the limit
    if total < MIN_MEMORY:
        return Check("memory", "warning", f"{size(total)}: Ray kills workers when memory is full",
                     f"give this machine or container {size(MIN_MEMORY)} or more")
    return Check("memory", "ok", size(total))


def shared_memory() -> Check:
    """Check that Ray's object store fits into shared memory."""
    if not Path("/dev/shm").is_dir():
        return Check("shared memory", "ok", "no /dev/shm on this system")
    total = shutil.disk_usage("/dev/shm").total
    if total < MIN_SHM:
        return Check("shared memory", "warning", f"/dev/shm has {size(total)}: Ray's object store falls back to disk",
                     "start the container with --shm-size=4g, or mount a larger tmpfs at /dev/shm")
    return Check("shared memory", "ok", f"/dev/shm has {size(total)}")


def limits() -> Iterator[Check]:
    """Check the limits of this process, which its children inherit."""
    for name, kind, least, word in (("open files", resource.RLIMIT_NOFILE, MIN_FILES, "-n"),
                                    ("processes", resource.RLIMIT_NPROC, MIN_PROCESSES, "-u")):
        soft, hard = resource.getrlimit(kind)
        shown = "unlimited" if soft < 0 else str(soft)
        if 0 <= soft < least:
            yield Check(name, "warning", f"limit {shown}", f"ulimit {word} {min(hard, 65536) if hard > 0 else 65536}")
        else:
            yield Check(name, "ok", f"limit {shown}")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path(INFINIBAND).is_dir() and 0 <= soft < MIN_LOCKED:
        yield Check("locked memory", "warning", f"limit {size(soft)}, with InfiniBand adapters here: NCCL cannot "
                    "register its buffers", "ulimit -l unlimited, for containers --ulimit memlock=-1")


def disks() -> Iterator[Check]:
    """Check the free space of the temporary and the working folder's disk."""
    for name, path in (("temporary disk", tempfile.gettempdir()), ("working disk", str(Path.cwd()))):
        usage = shutil.disk_usage(path)
        detail = f"{size(usage.free)} free at {path}"
        full = 1 - usage.free / usage.total
        if usage.free < MIN_DISK / 5:
            yield Check(name, "failure", detail, "free some space, or set TMPDIR to a larger disk")
        elif usage.free < MIN_DISK or full > SPILL_LIMIT:
            yield Check(name, "warning", f"{detail}, {full:.0%} full",
                        f"free some space: Ray refuses to spill to a disk that is more than {SPILL_LIMIT:.0%} full")
        else:
            yield Check(name, "ok", detail)
