"""What people see while something runs: progress bars on a terminal, plain lines elsewhere.

In a job's log (`ray job logs`, CI) a bar that redraws itself is noise, so there the same progress
becomes one line every few seconds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

#: Columns of tables that go to a file or a pipe.
WIDTH = 140

console = Console(stderr=True, highlight=False, soft_wrap=True, width=None if sys.stderr.isatty() else WIDTH)


@dataclass
class Bar:
    """One progress bar: `advance` and `update` are safe to call from any thread."""

    title: str
    total: float | None = None
    done: float = 0
    note: str = ""
    unit: str = ""
    _live: Any = field(default=None, repr=False)
    _task: Any = field(default=None, repr=False)
    _shown: float = field(default=0.0, repr=False)
    _began: float = field(default_factory=time.monotonic, repr=False)

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """`amount` more is done."""
        self.update(self.done + amount, note=note)

    def update(self, done: float, *, total: float | None = None, note: str | None = None) -> None:
        """`done` of the total is done; `note` is shown behind the bar."""
        self.done = done
        self.total = total if total is not None else self.total
        self.note = note if note is not None else self.note
        if self._live is not None:
            self._live.update(self._task, completed=self.done, total=self.total, note=self.note)
        elif time.monotonic() - self._shown >= 5:
            self._say()

    def _say(self, last: bool = False) -> None:
        self._shown = time.monotonic()
        total = f"/{self.total:g}" if self.total else ""
        spent = f"  {self._shown - self._began:.1f} s" if last else ""
        console.print(f"{self.title}: {self.done:g}{total} {self.unit}  {self.note}{spent}".rstrip())


@contextlib.contextmanager
def bars() -> Iterator[Bars]:
    """A group of progress bars, drawn together."""
    group = Bars(None)
    if console.is_terminal:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        with Progress(SpinnerColumn(), TextColumn("{task.description:<28}"), BarColumn(bar_width=30),
                      TextColumn("{task.completed:g}/{task.total:g} {task.fields[unit]}"), TimeElapsedColumn(),
                      TimeRemainingColumn(), TextColumn("[dim]{task.fields[note]}"), console=console,
                      refresh_per_second=4) as live:
            group.live = live
            yield group
    else:
        yield group


class Bars:
    """A group of bars; see `bars`."""

    def __init__(self, live: Any) -> None:
        self.live = live

    @contextlib.contextmanager
    def bar(self, title: str, total: float | None = None, unit: str = "") -> Iterator[Bar]:
        """A bar that stays on the screen, at its final value, when its block ends."""
        bar = Bar(title, total, unit=unit)
        if self.live is not None:
            bar._live = self.live
            bar._task = self.live.add_task(title, total=total or 0, note="", unit=unit)
        try:
            yield bar
        finally:
            if self.live is None:
                bar._say(last=True)
            else:
                self.live.stop_task(bar._task)


def print_table(rows: Sequence[dict[str, Any]], *, title: str = "", to: Console | None = None) -> None:
    """Rows of equal keys as a table; on standard output unless `to` says otherwise. Numbers stand on the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for key in rows[0] if rows else ["nothing"]:
        right = bool(rows) and str(rows[0][key]).replace(",", "").replace(".", "").isdigit()
        table.add_column(key, justify="right" if right else "left", overflow="fold")
    for row in rows:
        cells = [f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()]
        table.add_row(*map(Text, cells))  # what a document says is no markup
    target = to or Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    target.print(table)
