"""Leases in a store: while one driver holds the lease of a task, no other driver starts the task.

A lease is a numbered object, `<key>/000007.json`. The driver that creates the next number holds the lease, and rewrites
its object every few seconds. A lease is free once it is released, or once its object has not changed for `ttl_seconds`
by the waiting driver's own clock; clocks of two machines are never compared. A holder that sees a higher number has
lost the lease.

Creating is atomic if the store supports it (see `conditional_create`). On other stores each candidate writes a claim
and waits, and the lowest claim wins. A candidate that was slow to write its claim withdraws it, so that it cannot
displace a winner.

Leases only save duplicate work. Results never depend on them, because outputs are content-addressed and published
atomically.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidewheel.conditional_create import creates_are_conditional
from tidewheel.errors import OwnershipError, StorageError
from tidewheel.storage import Store

TTL_SECONDS = 20.0
"""A lease that has not been renewed for this long is free."""
BEAT_SECONDS = 4.0
"""Time between two renewals."""
SETTLE_SECONDS = 2.0
"""Time that a candidate waits for other claims, on stores without atomic creates."""


@dataclass(frozen=True)
class Holder:
    """Process that holds a lease. On its own machine, other processes see at once when it has been killed."""

    driver: str
    """Unique id."""
    host: str
    pid: int
    started: str
    """Start time of the process, from the kernel; it distinguishes processes with the same id."""
    machine: str = ""
    """Boot id and process-id namespace, because containers and machines may share a host name. "" is unknown."""

    @classmethod
    def me(cls) -> Holder:
        """Return the holder for this process."""
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), _started(os.getpid()), _machine())

    def is_gone(self) -> bool:
        """Return whether the process has certainly ended. A holder on another machine may always be alive."""
        is_same_machine = self.host == socket.gethostname() and self.machine in ("", _machine())
        return is_same_machine and bool(self.started) and _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Leases:
    """Leases of one driver in one folder of a store.

    Args:
        store: the folder.
        holder: the driver.
        ttl_seconds: a lease that has not been renewed for this long is free.
        settle_seconds: time to wait for other claims, on stores without atomic creates.
        sleep: replaces `time.sleep` in tests.
        clock: replaces `time.monotonic` in tests.
    """

    def __init__(self, store: Store, holder: Holder, *, ttl_seconds: float = TTL_SECONDS,
                 settle_seconds: float = SETTLE_SECONDS, sleep: Callable[[float], Any] = time.sleep,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.holder = holder
        self._store, self._sleep, self._clock = store, sleep, clock
        self._ttl, self._settle = ttl_seconds, settle_seconds
        self._held: dict[str, str] = {}
        self._seen: dict[str, tuple[str, float]] = {}
        self._beats = 0
        self._lock = threading.Lock()

    def acquire(self, name: str) -> bool:
        """Try to take the lease; return False while another driver holds it.

        Check again later: the age of a lease is the time during which repeated calls saw no renewal.
        """
        newest = self._newest(name)
        if newest and not self._free(name, newest):
            return False
        key = self._take(name, _number(newest) + 1 if newest else 0)
        if key is None or self._newest(name) != key:  # a deleted number can be created once more
            return False
        with self._lock:
            self._held[name] = key
        for old in self._objects(name):
            if old < key:
                self._store.delete(old)
        return True

    def beat(self) -> list[str]:
        """Renew all leases of this driver; return the names of those that it has lost to others."""
        with self._lock:
            self._beats += 1
            held = dict(self._held)
        lost = [name for name, key in held.items() if (self._newest(name) or key) > key]
        for name, key in held.items():
            with self._lock:  # a lease that is released meanwhile stays free
                if name not in lost and self._held.get(name) == key:
                    self._write(key)
        with self._lock:
            for name in lost:
                self._held.pop(name, None)
        return lost

    def release(self, name: str) -> None:
        """Release the lease. Do nothing if another driver has taken it."""
        with self._lock:
            key = self._held.pop(name, None)
        if key is not None:
            self._write(key, released=True)

    def look(self, name: str) -> dict[str, Any] | None:
        """Return the holder's fields and the "time" of its last renewal (Unix seconds); None if the lease is free."""
        newest = self._newest(name)
        content = self._read(newest) if newest else None
        if content is None or content["released"] or Holder(**content["holder"]).is_gone():
            return None
        return {**content["holder"], "time": content["time"]}

    def _free(self, name: str, key: str) -> bool:
        content = self._read(key)
        if content is None or content["released"] or Holder(**content["holder"]).is_gone():
            return True
        mark = f"{key} {content['beat']}"
        now = self._clock()
        if self._seen.get(name, ("", 0.0))[0] != mark:
            self._seen[name] = (mark, now)
        return now - self._seen[name][1] > self._ttl

    def _take(self, name: str, number: int) -> str | None:
        """Return the key of lease `number` if this driver now holds it, else None."""
        key = f"{name}/{number:06d}.json"
        if creates_are_conditional(self._store):
            return key if self._store.create(key, self._content()) else None
        began = self._clock()
        if any(_number(other) >= number for other in self._objects(name)):
            return None
        claim = f"{name}/{number:06d}-{self.holder.driver}.json"
        self._write(claim)
        if self._clock() - began > self._settle / 2:
            self._store.delete(claim)  # too slow: another candidate may not have seen this claim
            return None
        self._sleep(self._settle)
        if min(other for other in self._objects(name) if _number(other) == number) != claim:
            self._store.delete(claim)
            return None
        return claim

    def _objects(self, name: str) -> list[str]:
        return sorted(entry.key for entry in self._store.list(name))

    def _newest(self, name: str) -> str | None:
        """Return the key of the object that counts: the lowest claim of the highest number; None if there is none."""
        keys = self._objects(name)
        return min((key for key in keys if _number(key) == _number(keys[-1])), default=None) if keys else None

    def _read(self, key: str) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = self._store.read_json(key)
        except FileNotFoundError:
            return None
        return content

    def _write(self, key: str, *, released: bool = False) -> None:
        self._store.write(key, self._content(released))

    def _content(self, released: bool = False) -> bytes:
        return json.dumps({"holder": vars(self.holder), "beat": self._beats, "time": time.time(),
                           "released": released}).encode()


class Held:
    """Lease that a thread renews; see `holding`.

    Args:
        leases: the driver's leases.
        name: name of this lease.
        beat_seconds: time between two renewals.
    """

    def __init__(self, leases: Leases, name: str, beat_seconds: float) -> None:
        self._leases, self._name, self._beat_seconds = leases, name, beat_seconds
        self._ended = threading.Event()
        self.lost = False
        """Whether another driver has taken the lease, because this process did not renew it in time."""
        self._thread = threading.Thread(target=self._renew, name=f"lease {name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop renewing the lease."""
        self._ended.set()

    def _renew(self) -> None:
        while not self.lost and not self._ended.wait(self._beat_seconds):
            try:
                self.lost = bool(self._leases.beat())
            except StorageError:  # unavailable for a moment: the lease outlives a few missed renewals
                continue


@contextlib.contextmanager
def holding(store: Store, name: str, what: str, *, say: Callable[[str], None] | None = None,
            ttl_seconds: float = TTL_SECONDS, beat_seconds: float = BEAT_SECONDS) -> Iterator[Held]:
    """Hold the lease `name` in `store` during the block, and release it at the end.

    Args:
        store: folder of the lease.
        name: name of the lease.
        what: description of the task for messages, such as "a pipeline is writing here".
        say: called with one line of text while it is unknown whether the present holder is alive.
        ttl_seconds: a lease that has not been renewed for this long is free.
        beat_seconds: time between two renewals.

    Raises:
        OwnershipError: another driver holds the lease and is alive.
        StorageError: the store does not answer.
    """
    leases = Leases(store, Holder.me(), ttl_seconds=ttl_seconds)
    first: float | None = None
    while not leases.acquire(name):
        seen = leases.look(name)
        if seen is None:
            continue
        holder = Holder(**{key: value for key, value in seen.items() if key != "time"})
        if first is None and say is not None:
            say(f"{store.uri}: {what}: {holder}; waiting up to {ttl_seconds:g} s to see whether it is alive")
        if first is not None and seen["time"] != first:
            alive = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seen["time"]))
            raise OwnershipError(f"{what}: {holder}, last sign of life {alive}", where=store.uri,
                                 fix="wait until it has ended or stop it, then repeat the command; or write to another "
                                 "folder")
        first = seen["time"]
        time.sleep(beat_seconds / 2)
    held = Held(leases, name, beat_seconds)
    try:
        yield held
    finally:
        held.close()
        with contextlib.suppress(StorageError):  # a lease that is not released expires
            leases.release(name)


def _number(key: str) -> int:
    return int(key.rpartition("/")[2][:6])


def _machine() -> str:
    """Return the boot id and the process-id namespace of this process; "" if the kernel does not expose them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return a process's start time in kernel ticks; "" if it has ended, "unknown" on systems without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        return "" if Path("/proc/self/stat").exists() else "unknown"
