"""TensorBoard event files, in a local folder or an object store, continued after restarts without duplicate steps.

Objects cannot be appended to. So each flush uploads the newest event file again until it has `FILE_BYTES`, as logs do
(`jsonlog`). TensorBoard reads the files in the order of their names. A run that continues from step s first writes
TensorBoard's restart mark, which drops what was written for later steps.
"""

from __future__ import annotations

import os
import shutil
import time

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from tidewheel.private_folders import hold, make_temporary
from tidewheel.storage import Store
from tidewheel.train.metrics.scalars import scalars
from tidewheel.train.metrics.sinks import Record, Sink

FOLDER = "tensorboard"
FILE_BYTES = 1 << 20
"""A file of this size on an object store is complete and not uploaded again."""


class EventFiles(Sink):
    """A sink that writes event files.

    Args:
        store: the run's store.
        step: the run continues after this step; 0 when it begins.
        generation: generation of workers, part of the files' names.
        flush_seconds: time between two flushes.
    """

    def __init__(self, store: Store, *, step: int = 0, generation: int = 0,
                 flush_seconds: float) -> None:
        self._store = store
        self._generation = generation
        self._flush_seconds = flush_seconds
        local = store.local_path(FOLDER)
        self._remote = local is None
        self._temporary = None
        if local is None:
            self._temporary = make_temporary("tensorboard")
            self._held = hold(self._temporary)
            local = self._temporary / "events"
        self._folder = local
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer: EventsWriter | None = None
        self._newest = self._folder  # the file that is being written
        self._parts = 0
        self._flushed = time.monotonic()
        self._last = step
        if step or generation:
            self.restart(step)

    def write(self, record: Record) -> None:
        step, at = int(record["step"]), float(record["time"])
        if "loss" in record:
            if step <= self._last:  # after a rollback
                self._add(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
            self._last = step
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record).items()]
        if values:  # one event for all, ten times as fast as `summary.scalar` for each
            self._add(Event(step=step, wall_time=at, summary=Summary(value=values)))
        if record.get("sample"):
            text = "    " + str(record["sample"]).replace("\n", "\n    ")  # as code, so that nothing renders it
            self._add(Event(step=step, wall_time=at, summary=summary.text("sample", text)))
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self.flush()

    def restart(self, step: int) -> None:
        """Write TensorBoard's restart mark, which drops the events after `step`."""
        self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def flush(self) -> None:
        self._flushed = time.monotonic()
        if self._writer is not None:
            self._writer.flush()
        if self._remote:
            self._upload()

    def close(self) -> None:
        self.flush()
        self._end_file()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
            os.close(self._held)

    def _add(self, event: Event) -> None:
        if not event.wall_time:
            event.wall_time = time.time()
        if self._writer is None:
            suffix = f".{self._generation:06d}.{self._parts:06d}"
            self._parts += 1
            self._writer = EventsWriter(str(self._folder / "events"), suffix)
            if self._remote:  # the folder is this process's own
                self._newest = max(self._folder.glob(f"*{suffix}"))
        self._writer.write_event(event)

    def _end_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _upload(self) -> None:
        """Upload the files that were not uploaded yet, the newest last."""
        for path in sorted(self._folder.iterdir()):
            content = path.read_bytes()
            try:
                self._store.write(f"{FOLDER}/{path.name}", content)
            except BaseException:
                self._end_file()  # the upload may still arrive late, so the file must not grow any more
                raise
            if len(content) >= FILE_BYTES:
                self._end_file()
            if self._writer is None or path != self._newest:
                path.unlink()
