"""The base class of trackers: parts that send a run's figures to where people look at them.

    class Table(tw.Tracker):
        "The loss of each step as a CSV file."
        path: str

        def write(self, record: tw.Record) -> None:
            if "loss" in record:
                with open(self.path, "a") as file:
                    file.write(f"{record['step']},{record['loss']}\\n")

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from tidewheel.config import Setting
from tidewheel.parts import Part
from tidewheel.storage import Store
from tidewheel.train.metrics.sinks import Record, Sink


@dataclass(frozen=True)
class TrackedRun:
    """The run whose figures a tracker takes, at the start of a generation of workers."""

    id: str
    store: Store
    """The run's folder."""
    step: int
    """The run continues after this step; 0 at its beginning."""
    recorded: int
    """Last step that was recorded before. Steps after `step` up to it come again."""
    generation: int
    """Number of the generation of workers."""
    settings: Mapping[str, Setting]
    """The run's configuration as JSON values, without secrets."""
    gauges: Callable[[], Sink] | None = None
    """Creates the cluster's own gauges; None without a cluster."""


class Tracker(Part):
    """Base of every tracker; its fields are its settings.

    It runs in one thread of rank 0, beside the training, so a slow tracker delays no step. An error of a service that
    does not answer is logged, counted ("tracker_failures" in metrics.jsonl) and reported once, in an event
    `sink_failed`; the tracker gets the next record nevertheless. A mistake in its code ends the run. Each generation of
    workers opens the tracker again. A step that is repeated after a failure is logged again, with a later "time".
    """

    STORE_SECONDS: ClassVar[float] = 0.0
    """Seconds between two writes to the run's folder, for `tidewheel plan`; 0 if it writes nothing there."""

    def check(self) -> None:
        """Raise ConfigError if the tracker cannot work here, for example because a package is missing."""

    def open(self, run: TrackedRun) -> Sink | None:
        """Return the sink for the records of a generation, or None if there is nothing to write to here.

        By default the sink is a copy of this tracker.
        """
        return self.model_copy()

    def write(self, record: Record) -> None:
        """Take one record: "step" and "time", numbers by name, or "validation" or "sample"."""
        raise NotImplementedError

    def restart(self, step: int) -> None:
        """Continue after `step`, where the run went back to: earlier records of later steps no longer hold."""

    def flush(self) -> None:
        """Write out collected records."""

    def close(self) -> None:
        """Write out collected records and let go; the last call of a generation."""
