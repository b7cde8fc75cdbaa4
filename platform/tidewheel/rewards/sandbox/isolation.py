"""Limits of a process that is about to run a model's code. Needs no root, no namespaces and no package.

`child.py` imports this file without the package around it. Landlock (Linux 5.13 and later) keeps files away, seccomp
forbids system calls, and resource limits bound time and memory. All three hold for the rest of the process's life.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys

THREAD_FLAG = 0x10000
"""CLONE_THREAD: threads may begin, processes may not."""
NO_NEW_PRIVILEGES, PARENT_DEATH_SIGNAL, SET_SECCOMP, FILTER_MODE = 38, 1, 22, 2
CAPABILITY_VERSION = 0x20080522
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE, LIMITS_OF_OTHERS = {"x86_64": 56, "aarch64": 220}, {"x86_64": 302, "aarch64": 261}
CLONE3 = 435
EVERYWHERE = (424, 425, 428, 429, 430, 432, 434, 438, 442, 447, 452, 463, 466)
"""pidfd_send_signal, io_uring_setup, open_tree, move_mount, fsopen, fsmount, pidfd_open, pidfd_getfd, mount_setattr,
memfd_secret, fchmodat2, setxattrat and removexattrat have one number on all machines."""
FORBIDDEN = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "memfd_create": (319, 279), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "syslog": (103, 116),
    "fanotify_init": (300, 262), "open_by_handle_at": (304, 265), "truncate": (76, 45), "chmod": (90, -1),
    "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1),
    "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}
"""System calls that fail with EPERM, by their numbers on x86_64 and aarch64: network, other processes, and what changes
files by their path without a right that Landlock knows."""
EPERM, ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of access rights by Landlock's version; 16 in later ones."""
_READ, _READ_FILE, _FILE = 0b1100, 0b100, 0b1100_0000_0000_0111
_IN_FOLDER = 0b0111_0101_1011_1110
"""All rights but to execute, and to make devices and sockets, and to control devices."""
READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime",
            "/dev/zero", "/dev/random", "/dev/urandom")


class Impossible(Exception):
    """This machine lacks something that the isolation needs."""


def limit(cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Bound processor time, address space and the size of files.

    Args:
        cpu_seconds: then SIGXCPU, and a second later SIGKILL.
        memory_bytes: of the address space.
        file_bytes: of each file.
    """
    for what, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_FSIZE, file_bytes),
                        (resource.RLIMIT_AS, memory_bytes)):
        _, most = resource.getrlimit(what)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(what, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


def no_processes() -> None:
    """Forbid new processes and threads by a resource limit, which the kernel does not apply to root."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def isolate(folder: str) -> None:
    """Take away network, other processes, privileges, and all files but a folder and the standard library.

    Args:
        folder: where files may be written.

    Raises:
        Impossible: the kernel or the machine cannot do so.
    """
    if sys.platform != "linux" or platform.machine() not in AUDIT_ARCH:
        raise Impossible(f"there is no isolation for {sys.platform} on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")
    _checked(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    _restrict_files(libc, folder)
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    _checked(libc.capset(header, bytes(24)), "capset")
    program = filter_program(platform.machine())
    code = ctypes.create_string_buffer(program, len(program))
    address = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _checked(libc.prctl(SET_SECCOMP, FILTER_MODE, address, 0, 0), "seccomp (CONFIG_SECCOMP_FILTER)")


def filter_program(machine: str) -> bytes:
    """Return the seccomp filter as BPF instructions of 8 bytes.

    Args:
        machine: a key of `AUDIT_ARCH`.
    """
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":  # calls of the x32 interface have a bit of their own
        lines += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    numbers = [pair[machine == "aarch64"] for pair in FORBIDDEN.values()]
    for number in (*numbers, *EVERYWHERE):
        if number >= 0:
            lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | EPERM)]
    lines += [(_EQUAL, 0, 1, CLONE3), (_RETURN, 0, 0, _ERRNO | ENOSYS)]  # the C library then calls clone
    lines += [(_EQUAL, 0, 4, CLONE[machine]), (_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, THREAD_FLAG),
              (_RETURN, 0, 0, _ERRNO | EPERM), (_RETURN, 0, 0, _ALLOW)]
    lines += [(_EQUAL, 0, 4, LIMITS_OF_OTHERS[machine]), (_LOAD, 0, 0, 16), (_EQUAL, 1, 0, 0),
              (_RETURN, 0, 0, _ERRNO | EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in (*lines, (_RETURN, 0, 0, _ALLOW)))


def _restrict_files(libc: ctypes.CDLL, folder: str) -> None:
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        raise Impossible("the kernel has no Landlock (CONFIG_SECURITY_LANDLOCK, and landlock in its list of modules)")
    handled = (1 << _RIGHTS.get(version, 16)) - 1
    rules = _checked(libc.syscall(LANDLOCK_CREATE, struct.pack("Q", handled), 8, 0), "Landlock")
    allowed = [(path, _READ) for path in (*READABLE, f"{sys.base_prefix}/lib", *sys.path)]
    for path, rights in (*allowed, ("/dev/null", _FILE), (folder, _IN_FOLDER)):
        if not os.path.exists(path):
            continue
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights &= handled if os.path.isdir(path) else handled & _FILE
        _checked(libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("Qi", rights, place), 0), f"Landlock for {path}")
        os.close(place)
    _checked(libc.syscall(LANDLOCK_RESTRICT, rules, 0), "Landlock")
    os.close(rules)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise Impossible(f"{what} failed: {os.strerror(ctypes.get_errno())}")
    return result
