"""Leases in the store: while one driver holds the lease of a task, no other starts the task.

A lease is a numbered object, `<key>/000007.json`; who creates the next number holds it. The holder rewrites its own
object every few seconds. A lease is free when it was released, or when its object has not changed for `ttl_seconds` by
the clock of the one who waits: no two machines' clocks are compared. A holder that finds a higher number has lost.

Creating is atomic where the store can do it (`Store.create`, tried out once). Elsewhere each candidate writes a claim
of its own, waits, and the least of the claims wins; a candidate that was slow to write its claim takes it back, so that
nobody who has won is overtaken.

Leases save work that two drivers would do twice. Results never depend on them: outputs are content-addressed, and
published atomically.
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
BEAT_SECONDS = 4.0
SETTLE_SECONDS = 2.0


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, for people, and to see at once that a killed process of this machine is gone."""

    driver: str
    """Unique."""
    host: str
    pid: int
    started: str
    """Start time of the process, from the kernel: a reused process id is another process."""
    machine: str = ""
    """Boot and process-id namespace: containers and machines may share a host name. "" is unknown."""

    @classmethod
    def me(cls) -> Holder:
        """Return this process."""
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), _started(os.getpid()), _machine())

    def is_gone(self) -> bool:
        """Return True when the process certainly has ended. A holder on another machine may be alive."""
        here = self.host == socket.gethostname() and self.machine in ("", _machine())
        return here and bool(self.started) and _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Leases:
    """Leases below one folder of a store, for one driver."""

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
        """Try to take the lease; False while somebody else holds it. Ask again later: that is how age is told."""
        newest = self._newest(name)
        if newest and not self._free(name, newest):
            return False
        key = self._take(name, _number(newest) + 1 if newest else 0)
        if key is None or self._newest(name) != key:  # a number that was removed can be created once more
            return False
        with self._lock:
            self._held[name] = key
        for old in self._objects(name):
            if old < key:
                self._store.delete(old)
        return True

    def beat(self) -> list[str]:
        """Say that this driver lives; the names of leases that it has lost to others."""
        with self._lock:
            self._beats += 1
            held = dict(self._held)
        lost = [name for name, key in held.items() if (self._newest(name) or key) > key]
        for name, key in held.items():
            with self._lock:  # one that is given back meanwhile stays free
                if name not in lost and self._held.get(name) == key:
                    self._write(key)
        with self._lock:
            for name in lost:
                self._held.pop(name, None)
        return lost

    def release(self, name: str) -> None:
        """Give it back; a lease that was lost meanwhile is no error."""
        with self._lock:
            key = self._held.pop(name, None)
        if key is not None:
            self._write(key, released=True)

    def look(self, name: str) -> dict[str, Any] | None:
        """What the newest lease says: "driver", "host", "pid", "time" of the last beat; None when nobody holds it."""
        newest = self._newest(name)
        found = self._read(newest) if newest else None
        return None if found is None or found["released"] or Holder(**found["holder"]).is_gone() else {
            **found["holder"], "time": found["time"]}

    def _free(self, name: str, key: str) -> bool:
        content = self._read(key)
        if content is None or content["released"] or Holder(**content["holder"]).is_gone():
            return True
        mark, now = f"{key} {content['beat']}", self._clock()
        if self._seen.get(name, ("", 0.0))[0] != mark:
            self._seen[name] = (mark, now)
        return now - self._seen[name][1] > self._ttl

    def _take(self, name: str, number: int) -> str | None:
        """The key of lease `number`, if it is ours now."""
        key = f"{name}/{number:06d}.json"
        if creates_are_conditional(self._store):
            return key if self._store.create(key, self._content()) else None
        began = self._clock()
        if any(_number(other) >= number for other in self._objects(name)):
            return None
        claim = f"{name}/{number:06d}-{self.holder.driver}.json"
        self._write(claim)
        if self._clock() - began > self._settle / 2:
            self._store.delete(claim)  # too slow: another may have looked before our claim was there
            return None
        self._sleep(self._settle)
        if min(other for other in self._objects(name) if _number(other) == number) != claim:
            self._store.delete(claim)
            return None
        return claim

    def _objects(self, name: str) -> list[str]:
        return sorted(entry.key for entry in self._store.list(name))

    def _newest(self, name: str) -> str | None:
        """The object that counts: of the highest number, the least claim."""
        found = self._objects(name)
        return min((key for key in found if _number(key) == _number(found[-1])), default=None) if found else None

    def _read(self, key: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._store.read_json(key)
        except FileNotFoundError:
            return None
        return found

    def _write(self, key: str, *, released: bool = False) -> None:
        self._store.write(key, self._content(released))

    def _content(self, released: bool = False) -> bytes:
        return json.dumps({"holder": vars(self.holder), "beat": self._beats, "time": time.time(),
                           "released": released}).encode()


class Held:
    """A lease that a thread renews; see `holding`."""

    def __init__(self, leases: Leases, name: str, beat_seconds: float) -> None:
        self._leases, self._name, self._beat_seconds = leases, name, beat_seconds
        self._ended = threading.Event()
        self.lost = False
        """Somebody else has it: this process showed no sign of life for too long."""
        self._thread = threading.Thread(target=self._renew, name=f"lease {name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Renew no more."""
        self._ended.set()

    def _renew(self) -> None:
        while not self.lost and not self._ended.wait(self._beat_seconds):
            try:
                self.lost = bool(self._leases.beat())
            except StorageError:  # it is away for a moment: the lease lives some beats longer
                continue


@contextlib.contextmanager
def holding(store: Store, name: str, what: str, *, say: Callable[[str], None] | None = None,
            ttl_seconds: float = TTL_SECONDS, beat_seconds: float = BEAT_SECONDS) -> Iterator[Held]:
    """Hold the lease `name` below `store` inside the block, and give it back at the end.

    Args:
        what: the task, for the error: "a pipeline is writing here".
        say: called with one line when a holder is found of which it is not known whether it lives.

    Raises:
        OwnershipError: somebody else holds it and lives.
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
            say(f"{store.uri}: {what}: {holder}; looking for up to {ttl_seconds:g} s whether it lives")
        if first is not None and seen["time"] != first:
            alive = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seen["time"]))
            raise OwnershipError(f"{what}: {holder}, last sign of life {alive}", where=store.uri,
                                 fix="wait until it has ended or stop it, then give the command again; or write to "
                                 "another place")
        first = seen["time"]
        time.sleep(beat_seconds / 2)
    held = Held(leases, name, beat_seconds)
    try:
        yield held
    finally:
        held.close()
        with contextlib.suppress(StorageError):  # a lease that is not given back lapses
            leases.release(name)


def _number(key: str) -> int:
    return int(key.rpartition("/")[2][:6])


def _machine() -> str:
    """Identity of this boot and of this process-id namespace; "" where the kernel does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Start time of a process in the kernel's ticks; "" when there is none, or no way to know."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        return "" if Path("/proc/self/stat").exists() else "unknown"
