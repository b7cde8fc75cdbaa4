"""Shared memory that can be had, under limits of made-up containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidewheel.checkpoint.memory_tier.room import free_bytes

MB = 1 << 20


def machine(root: Path, *, available: int = 1 << 50, cgroup: str = "0::/\n") -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)


def group(folder: Path, names: tuple[str, str, str], limit: object, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (str(limit), str(used), f"anon 5\n{names[2]} {cache}\n"), strict=True):
        (folder / (name if name.startswith("memory.") else "memory.stat")).write_text(text + "\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def room(root: Path) -> int:
    return free_bytes(root, root=root)


def test_without_a_container_the_machine_decides(tmp_path: Path) -> None:
    machine(tmp_path, available=7 * MB)
    assert room(tmp_path) == 7 * MB
    group(tmp_path / "sys/fs/cgroup", V2, "max", 0)
    assert room(tmp_path) == 7 * MB


@pytest.mark.parametrize(("cgroup", "mount", "names"), [
    ("0::/\n", "sys/fs/cgroup", V2),
    ("0::/kubepods/pod1/c1\n", "sys/fs/cgroup", V2),  # the host's path, of which nothing is mounted here
    ("9:pids:/\n4:memory:/docker/c1\n0::/\n", "sys/fs/cgroup/memory", V1),
    ("4:hugetlb,memory:/\n", "sys/fs/cgroup/memory", V1),
])
def test_the_containers_limit_counts_without_cache_that_can_go(tmp_path: Path, cgroup: str, mount: str,
                                                               names: tuple[str, str, str]) -> None:
    machine(tmp_path, available=900 * MB, cgroup=cgroup)
    group(tmp_path / mount, names, 100 * MB, 70 * MB, cache=20 * MB)
    assert room(tmp_path) == 50 * MB


def test_the_tightest_of_the_groups_around_decides(tmp_path: Path) -> None:
    machine(tmp_path, cgroup="0::/kubepods/pod1/c1\n")
    mount = tmp_path / "sys/fs/cgroup"
    group(mount / "kubepods/pod1/c1", V2, 100 * MB, 10 * MB)
    group(mount / "kubepods/pod1", V2, 100 * MB, 60 * MB)
    group(mount / "kubepods", V2, "max", 500 * MB)
    assert room(tmp_path) == 40 * MB


def test_a_full_container_has_none_and_an_old_unlimited_one_has_all(tmp_path: Path) -> None:
    machine(tmp_path, available=3 * MB, cgroup="4:memory:/\n")
    group(tmp_path / "sys/fs/cgroup/memory", V1, 9223372036854771712, 10 * MB)
    assert room(tmp_path) == 3 * MB
    group(tmp_path / "sys/fs/cgroup/memory", V1, 10 * MB, 11 * MB)
    assert room(tmp_path) == 0
