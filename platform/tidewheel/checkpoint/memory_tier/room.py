"""How much shared memory can be allocated, by the limits of its file system, the machine and the container."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tidewheel.errors import CheckpointError

UNLIMITED = 1 << 60
"""cgroup v1 reports about 2^63 when there is no limit."""


def free_bytes(folder: Path, *, root: Path = Path("/")) -> int:
    """Return how many bytes can be allocated under `folder` before the machine or the container runs out of memory.

    Pages of shared memory count towards the container's limit, which may be far below the size of the file system.

    Args:
        folder: a folder in shared memory.
        root: the folder that /proc and /sys are in.
    """
    stats = os.statvfs(folder)
    limits = [stats.f_bavail * stats.f_frsize]
    with contextlib.suppress(OSError):  # not Linux: the file system is the only limit known
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    return max(0, min([*limits, *_left_in_container(root)]))


def check_room(folder: Path, requested: int) -> None:
    """Check that `requested` bytes are free.

    Raises:
        CheckpointError: they are not.
    """
    if requested > free_bytes(folder):
        raise no_room(folder, requested)


def no_room(folder: Path, requested: int) -> CheckpointError:
    """Return the error for a shared memory that has less than `requested` bytes free."""
    return CheckpointError(
        f"{requested / 1e9:.2f} GB more of shared memory are needed for the memory tier, "
        f"{free_bytes(folder) / 1e9:.2f} GB are free", where=str(folder),
        fix="make it larger (containers: --shm-size, and a memory limit with room for it; Kubernetes: an emptyDir "
            "with medium Memory), or turn the tier off: checkpoint.memory_tier.every_steps 0")


def _left_in_container(root: Path) -> Iterator[int]:
    """Yield the bytes up to the limit of this process's cgroup and of each cgroup around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left_above(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _left_above(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
                                   "memory.usage_in_bytes", "total_inactive_file")


def _left_above(mount: Path, path: str, limit: str, used: str, cache: str) -> Iterator[int]:
    """Yield the bytes left in the cgroup `path` and each one around it, up to the mount.

    Inside a container, `path` may be the host's. Then only the mount itself, the container's own cgroup, exists.
    """
    innermost = mount / path.lstrip("/")
    for folder in (innermost, *innermost.parents):
        with contextlib.suppress(OSError, ValueError):  # it does not exist, or the limit is "max"
            most = int((folder / limit).read_text())
            if most < UNLIMITED:
                yield most - (int((folder / used).read_text()) - _reclaimable(folder, cache))
        if folder == mount:
            return


def _reclaimable(folder: Path, name: str) -> int:
    """Return the bytes of inactive file cache: counted as used, but freed before an allocation fails."""
    with contextlib.suppress(OSError):
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
