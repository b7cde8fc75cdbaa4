"""Check what a run needs of its storage: put, read, list, conditional put, multipart, delete; measure the speed."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tidewheel.cluster.doctor.check import Check
from tidewheel.errors import TidewheelError
from tidewheel.storage import CHUNK_BYTES, Store, is_remote, store

SMALL_BYTES = 4 << 10
LARGE_BYTES = 40 << 20
"""More than two parts of an upload (`streams.PART_BYTES`): enough to measure the bandwidth in a short time."""
SKEW_WARNING, SKEW_FAILURE = 60.0, 840.0
"""Seconds. Stores refuse requests whose signature is 15 minutes off (RequestTimeTooSkewed)."""
STAMP_SECONDS = 1.0
"""Resolution of the time that a store gives an object."""
FIX = "check the URI, the credentials in the environment, and the store"


@dataclass
class _Probe:
    """A folder below the URI in which requests are tried, with a finding for each."""

    uri: str
    store: Store
    folder: str
    checks: list[Check] = field(default_factory=list)

    def key(self, name: str) -> str:
        """Return the key of an object of the folder."""
        return f"{self.folder}/{name}"

    def attempt(self, what: str, work: Callable[[], tuple[bool, str]], fix: str,
                status: Any = "failure") -> bool:
        """Try one thing; return whether it works.

        Args:
            what: name of the finding.
            work: function that returns whether all is well, and a sentence about it.
            fix: fix to show if not.
            status: status of the finding if not.
        """
        name = f"storage {what}"
        try:
            works, detail = work()
        except TidewheelError as error:
            self.checks.append(Check(name, "failure", f"{error.where or self.uri}: {error.what}", error.fix))
            return False
        except Exception as error:
            self.checks.append(Check(name, "failure", f"{type(error).__name__}: {error}"[:300], FIX))
            return False
        self.checks.append(Check(name, "ok" if works else status, detail, "" if works else fix))
        return works


def storage(uri: str) -> list[Check]:
    """Try every kind of request below `uri`; leave nothing there."""
    try:
        root = store(uri)
        root.check()
    except TidewheelError as error:
        return [Check("storage", "failure", f"{uri} cannot be reached: {error.what}", error.fix)]
    except Exception as error:
        return [Check("storage", "failure", f"{uri} cannot be reached: {type(error).__name__}: {error}"[:300], FIX)]
    probe = _Probe(uri, root, f".tidewheel-doctor-{uuid.uuid4().hex}")
    try:
        if probe.attempt("put", lambda: _put(probe), FIX):
            probe.attempt("list", lambda: _list(probe), "use a store that lists an object as soon as it is written")
            probe.attempt("conditional put", lambda: _conditional(probe), "two drivers of one workflow could run the "
                          "same step: start one only, or use a store with If-None-Match", "warning")
            probe.attempt("multipart" if is_remote(uri) else "write", lambda: _large(probe),
                          "use a store with read-after-write consistency")
            if is_remote(uri):
                probe.attempt("clock", lambda: _clock(probe), "synchronise this machine's clock (chrony, ntp): "
                              "requests signed 15 minutes off are refused", "warning")
    finally:
        probe.attempt("delete", lambda: _delete(probe), f"remove {root.uri}/{probe.folder} by hand, and allow "
                      "deletion: old checkpoints are deleted")
    return probe.checks


def _put(probe: _Probe) -> tuple[bool, str]:
    data = os.urandom(SMALL_BYTES)
    began = time.monotonic()
    probe.store.write(probe.key("small"), data)
    wrote = time.monotonic()
    same = probe.store.read(probe.key("small")) == data
    took = f"{1000 * (wrote - began):.0f} ms to write 4 KiB, {1000 * (time.monotonic() - wrote):.0f} ms to read them"
    return same, f"{probe.uri}: {took}" if same else f"{probe.uri} does not return what was written to it"


def _list(probe: _Probe) -> tuple[bool, str]:
    began = time.monotonic()
    listed = [entry.key for entry in probe.store.list(probe.folder)]
    if probe.key("small") not in listed:
        return False, "an object that was just written is not listed"
    return True, f"{1000 * (time.monotonic() - began):.0f} ms"


def _conditional(probe: _Probe) -> tuple[bool, str]:
    """Check that the second of two conditional writers of a key is refused and changes nothing."""
    first, second = (probe.store.create(probe.key("once"), data) for data in (b"first", b"second"))
    if first and not second and probe.store.read(probe.key("once")) == b"first":
        return True, "the second writer of a key is refused"
    return False, "the second writer of a key succeeds: the store ignores If-None-Match"


def _large(probe: _Probe) -> tuple[bool, str]:
    chunk = os.urandom(CHUNK_BYTES)
    began = time.monotonic()
    with probe.store.writer(probe.key("large")) as sink:
        for _ in range(LARGE_BYTES // CHUNK_BYTES):
            sink.write(chunk)
    wrote = time.monotonic()
    data = probe.store.read(probe.key("large"))
    read = time.monotonic()
    if data != chunk * (LARGE_BYTES // CHUNK_BYTES):
        return False, f"{LARGE_BYTES >> 20} MiB came back changed"
    return True, (f"{LARGE_BYTES >> 20} MiB, one stream: write {LARGE_BYTES / (wrote - began) / 1e6:.0f} MB/s, "
                  f"read {LARGE_BYTES / (read - wrote) / 1e6:.0f} MB/s")


def _clock(probe: _Probe) -> tuple[bool, str]:
    """Compare this machine's clock with the time at which the store says that an object was written."""
    before = datetime.now(UTC).timestamp()
    probe.store.write(probe.key("clock"), b"time")
    after = datetime.now(UTC).timestamp()
    stamp = probe.store.written_at(probe.key("clock"))
    if before - STAMP_SECONDS <= stamp <= after + STAMP_SECONDS:
        return True, "agrees with the store's"
    off = before - stamp if stamp < before else after - stamp
    if abs(off) > SKEW_FAILURE:
        raise TidewheelError(f"{off:+.0f} s off the store's clock", where=probe.uri,
                             fix="synchronise this machine's clock (chrony, ntp)")
    return abs(off) < SKEW_WARNING, f"{off:+.0f} s off the store's clock"


def _delete(probe: _Probe) -> tuple[bool, str]:
    probe.store.delete_tree(probe.folder)
    left = probe.store.list(probe.folder)
    return not left, f"{len(left)} objects are left" if left else "nothing is left"
