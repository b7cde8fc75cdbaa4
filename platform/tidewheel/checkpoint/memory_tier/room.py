"""How much shared memory can be allocated: what its file system, the machine and the container still allow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tidewheel.errors import CheckpointError

UNLIMITED = 1 << 60
"""cgroup v1 says a number of about 2^63 where there is no limit."""


def free_bytes(folder: Path, *, root: Path = Path("/")) -> int:
    """Return what can be allocated under `folder` before the machine or the container runs out of memory.

    Pages of shared memory count against the container's limit, which may be far below what its file system offers.

    Args:
        root: where /proc and /sys are.
    """
    stats = os.statvfs(folder)
    found = [stats.f_bavail * stats.f_frsize]
    with contextlib.suppress(OSError):  # not Linux: the file system's word must do
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    return max(0, min([*found, *_left_to_container(root)]))


def check_room(folder: Path, wanted: int) -> None:
    """CheckpointError when `wanted` bytes are not free."""
    if wanted > free_bytes(folder):
        raise no_room(folder, wanted)


def no_room(folder: Path, wanted: int) -> CheckpointError:
    """What is said when shared memory is full."""
    return CheckpointError(
        f"{wanted / 1e9:.2f} GB more of shared memory are needed for the memory tier, "
        f"{free_bytes(folder) / 1e9:.2f} GB are free", where=str(folder),
        mend="make it larger (containers: --shm-size, and a memory limit with room for it; Kubernetes: an emptyDir "
             "with medium Memory), or turn the tier off: checkpoint.memory_tier.every_steps 0")


def _left_to_container(root: Path) -> Iterator[int]:
    """Bytes up to the limit of this process's cgroup and of each one around it."""
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
    """Of the cgroup `path` and those around it, up to the mount. In a container the path may be the host's: then only
    the mount itself, which is the container's own, is there."""
    place = mount / path.lstrip("/")
    for folder in (place, *place.parents):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            most = int((folder / limit).read_text())
            if most < UNLIMITED:
                yield most - (int((folder / used).read_text()) - _reclaimable(folder, cache))
        if folder == mount:
            return


def _reclaimable(folder: Path, name: str) -> int:
    """File cache that nobody used lately: counted as used, but given back before anything fails."""
    with contextlib.suppress(OSError):
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
