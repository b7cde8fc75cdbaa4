"""Train on a growing shard set: all ranks read the same waves, and wait together for the next.

Rank 0 looks for the next wave and sends its record to the other ranks. So all ranks know the same waves, and only one
polls the store. While they wait, the ranks meet every few seconds: no collective times out, and rank 0 hears the
cluster's requests. A finished set is a growing set with all its waves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from tidewheel.errors import ShardError, StorageAwayError
from tidewheel.shards import notices
from tidewheel.shards.growing import Growing, take_in
from tidewheel.shards.source import Source
from tidewheel.storage import is_remote, store
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.record import RunRecord
from tidewheel.train.runtime import Control
from tidewheel.train.storage_wait import StorageWait

POLL_SECONDS = 2.0
"""Between two looks for the next wave; less if collectives have a short time limit."""
ROLLOUT_POLL_SECONDS = 0.02
"""The same for rollouts in a local folder, where a look costs no request: a step waits for each wave of them."""
FAILED = "failed.json"
"""In the set's folder: why its writer has given up, {"error": text, "fix": text}."""


class Growth:
    """The waves that all ranks of a run know.

    Args:
        config: the run's settings.
        source: the training data as this rank has opened it. From the first `wait` on, it holds the waves that all
            ranks know: none at first.
        collectives: over all ranks.
        record: takes the waves that the run reads.
        control: hears the cluster's requests.
        retry: waits for storage.
    """

    def __init__(self, config: TrainConfig, source: Source, collectives: Collectives, record: RunRecord,
                 control: Control, retry: StorageWait) -> None:
        self._config, self._source, self._collectives = config, source, collectives
        self._record, self._control, self._retry = record, control, retry
        often = config.rollouts is not None and not is_remote(config.data.uri)
        poll = ROLLOUT_POLL_SECONDS if often else POLL_SECONDS
        self._poll = min(poll, config.guards.collective_timeout_seconds / 4)
        self._folder = store(source.domains[0].uri)
        self._told = 0
        self._since: float | None = None  # start of the present wait
        self._began = 0.0
        self._in_waves = bool(source.manifest.waves or source.manifest.to_come)
        if self._in_waves:
            self._seen = Growing.of(source.manifest)  # in the store; on rank 0
            self._known = self._seen.head()  # on all ranks

    def reaches(self, end: int) -> bool:
        """Return whether all positions below `end` can be read."""
        if not self._in_waves:
            return True
        reach, same = self._source.reach, self._source.manifest is self._known.manifest
        return same and (reach is None or end <= reach)

    def wait(self, step: int, end: int, ask: Callable[[], int]) -> int:
        """Wait for waves until all positions below `end` can be read. All ranks call it together.

        Args:
            step: the step that needs the data.
            end: position behind its last sequence.
            ask: returns the cluster's requests to rank 0 (`STOP`, `SAVE`), 0 for none.

        Returns:
            The requests that interrupted the wait, on all ranks; 0 if the data are there.

        Raises:
            ShardError: nothing came for `data.wait_seconds`, or it is not the set that the run has read.
        """
        if self._source.manifest is not self._known.manifest:
            self._source.grow(self._known.manifest)
        asked = 0
        while not asked and not self.reaches(end):
            asked = self._collectives.from_first(ask() if self._collectives.rank == 0 else 0)
            self._look(step)
        if self._since is not None and self.reaches(end):
            self._event("data_came", known=len(self._known.manifest.waves),
                        seconds=round(time.monotonic() - self._began, 1))
            self._since = None
        return asked

    def _look(self, step: int) -> None:
        given_up = False
        grown = b""
        if self._collectives.rank == 0:
            if self._since is not None:
                notices.wait(self._folder.uri, self._poll, self._told)
            self._told = notices.told(self._folder.uri)
            try:
                self._seen = take_in(self._folder, self._seen)
                self._check_writer()
            except StorageAwayError:  # retry, as for a wave that does not exist yet
                if self._waited() > self._config.data.wait_seconds:
                    raise
            records = self._seen.records(len(self._known.manifest.waves))
            if records:
                self._retry(lambda: self._record.take_in(records))
                grown = json.dumps(records).encode()
            given_up = not records and self._waited() > self._config.data.wait_seconds
        if self._collectives.from_first(int(given_up)):
            raise self._too_late()
        for values in json.loads(self._collectives.bytes_from_first(grown) or b"[]"):
            self._known = self._known.grown(values, self._source.domains[0].uri)
        if self._known.manifest is not self._source.manifest:
            self._source.grow(self._known.manifest)
            self._since = None if self._since is None else time.monotonic()
        elif self._since is None:
            self._since = self._began = time.monotonic()
            manifest = self._known.manifest
            self._event("data_wait", step=step, wave=len(manifest.waves) + 1,
                        waves=len(manifest.waves) + manifest.to_come)

    def _check_writer(self) -> None:
        """Raise the error that rollouts have ended with."""
        if self._config.rollouts is None or self._since is None:
            return
        folder = self._folder
        if folder.exists(FAILED):
            failure = folder.read_json(FAILED)
            raise ShardError(f"the rollouts have ended: {failure['error']}", where=folder.uri, fix=failure["fix"])

    def _waited(self) -> float:
        return 0.0 if self._since is None else time.monotonic() - self._since

    def _too_late(self) -> ShardError:
        manifest = self._known.manifest
        return ShardError(
            f"wave {len(manifest.waves) + 1} of {len(manifest.waves) + manifest.to_come} has not come for "
            f"{self._config.data.wait_seconds:g} s", where=self._source.domains[0].uri,
            fix="if the pipeline has ended, run it again and then this run: both continue. If the pipeline is only "
                "slow, raise data.wait_seconds")

    def _event(self, kind: str, **detail: object) -> None:
        if self._collectives.rank == 0 and self._config.rollouts is None:  # each step waits for its rollouts
            self._control.event(kind, **detail)
