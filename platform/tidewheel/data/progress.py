"""Progress bars of a pipeline: one a stage, counting units."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tidewheel.console import Bar, bars

OnProgress = Callable[[str, int, int, str], None]


@contextlib.contextmanager
def stage_bars() -> Iterator[OnProgress]:
    """Yields the `on_progress(stage, done_units, total_units, note)` that `pipeline.run` takes."""
    with contextlib.ExitStack() as open_bars, bars() as group:
        shown: dict[str, Bar] = {}

        def on_progress(stage: str, done: int, total: int, note: str = "") -> None:
            if stage not in shown:
                open_bars.close()  # stages run one after the other: the one before is done
                shown[stage] = open_bars.enter_context(group.bar(stage, total, unit="units"))
            shown[stage].update(done, total=total, note=note)

        with open_bars:
            yield on_progress
