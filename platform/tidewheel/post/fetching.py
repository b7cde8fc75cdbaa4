"""Fetch versions of the policy: the delta to a version that this process has, or else the whole."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from tidewheel.errors import CheckpointError
from tidewheel.post.policy import REMAKE, Version, VersionFile
from tidewheel.storage import Stamp, Store, content_hash
from tidewheel.train.policy import deltas

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """What a process read to have a version."""

    deltas: int = 0
    """Bytes of deltas."""
    whole: int = 0
    """Bytes of whole files."""
    damaged: int = 0
    """Deltas that were damaged, so that the whole file was read."""
    seconds: float = 0.0

    def __add__(self, other: Fetched) -> Fetched:
        return Fetched(self.deltas + other.deltas, self.whole + other.whole, self.damaged + other.damaged,
                       self.seconds + other.seconds)


class Fetcher:
    """Holds the files of one version in memory, from which deltas lead to the next.

    Args:
        run: the run's folder.
    """

    def __init__(self, run: Store) -> None:
        self._run = run
        self._files: dict[str, bytes] = {}  # by hash

    def fetch(self, version: Version) -> tuple[list[bytes], Fetched]:
        """Return the content of a version's files, each with the hash that the version names, and what was read.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        began, total = time.monotonic(), Fetched()
        files: dict[str, bytes] = {}
        for file in version.files:
            data = self._files.get(file.whole.hash)
            if data is None:
                data, damaged = self._from_delta(file)
                if data is not None and file.delta is not None:
                    total += Fetched(deltas=file.delta.bytes)
                else:
                    data = self._whole(file.whole)
                    total += Fetched(whole=len(data), damaged=damaged)
            files[file.whole.hash] = data
        self._files = files
        return list(files.values()), total + Fetched(seconds=time.monotonic() - began)

    def _from_delta(self, file: VersionFile) -> tuple[bytes | None, int]:
        """Return the content made from a delta, None if there is no way or it is damaged; and 1 if it is damaged."""
        before = self._files.get(file.before)
        if file.delta is None or before is None:
            return None, 0
        try:
            delta = self._run.read(file.delta.key)
            if content_hash(delta) != file.delta.hash:
                raise ValueError("its hash differs")
            data = deltas.decode(before, delta)
            if content_hash(data) != file.whole.hash:
                raise ValueError("it makes other weights than the version's")
        except FileNotFoundError:  # a newer version has replaced it
            return None, 0
        except ValueError as error:
            logger.warning("the delta %s is damaged, the whole version is read: %s", self._run.at(file.delta.key),
                           error)
            return None, 1
        return data, 0

    def _whole(self, stamp: Stamp) -> bytes:
        try:
            data = self._run.read(stamp.key)
        except FileNotFoundError:
            raise CheckpointError("the weights of this version are missing", where=self._run.at(stamp.key), fix=REMAKE
                                  ) from None
        if content_hash(data) != stamp.hash:
            raise CheckpointError("hash differs: the weights have changed", where=self._run.at(stamp.key), fix=REMAKE)
        return data
