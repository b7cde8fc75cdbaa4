"""Progress bars of a pipeline: one for each stage, counting units."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from tidewheel.console import Bar, bars

OnProgress = Callable[[str, int, int, str], None]


@contextlib.contextmanager
def stage_bars(stages: Sequence[str] = ()) -> Iterator[OnProgress]:
    """Yield an `on_progress(stage, done_units, total_units, note)` for `pipeline.run`.

    Args:
        stages: names of all stages in order (`pipeline.stages`), so that each bar shows the number of its stage.
    """
    with contextlib.ExitStack() as open_bars, bars() as group:
        shown: dict[str, Bar] = {}
        reached = 0

        def on_progress(stage: str, done: int, total: int, note: str = "") -> None:
            nonlocal reached
            if stage not in shown:
                open_bars.close()  # stages run one after another, so the one before is done
                reached = max(reached, _number(stage, stages))
                title = f"stage {reached} of {len(stages)}, {stage}" if reached else stage
                shown[stage] = open_bars.enter_context(group.bar(title, total, unit="units"))
            shown[stage].update(done, total=total, note=note)

        with open_bars:
            yield on_progress


def _number(stage: str, stages: Sequence[str]) -> int:
    """Return the number of a stage, or of the stage that it is a part of, from 1; 0 if its name does not match any."""
    return max((number for number, name in enumerate(stages, 1) if stage == name or stage.startswith(f"{name}_")),
               default=0)
