"""Progress for people: bars on a terminal, plain lines elsewhere.

In a job's log (`ray job logs`, CI) a bar that redraws itself is noise, so progress is one line every few seconds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from tidewheel.printable import printable_lines

WIDTH = 140
"""Columns of output to a file or a pipe."""
LOG_SECONDS = 5.0
"""Seconds between two lines of a bar in a log."""
FOLDED = 20
"""Columns of a table that are wider than this may fold on a narrow terminal."""



class Output(Console):
    """Output of a command. When its reader closes the pipe, as `head` does, it raises what `print` raises.

    rich alone would end the process with code 1.
    """

    def on_broken_pipe(self) -> None:
        """Raise what `print` raises."""
        raise BrokenPipeError


console = Console(stderr=True, highlight=False, soft_wrap=True, width=None if sys.stderr.isatty() else WIDTH)


@dataclass
class Bar:
    """A progress bar. `advance` and `update` may be called from any thread."""

    title: str
    total: float | None = None
    done: float = 0
    note: str = ""
    unit: str = ""
    _live: Any = field(default=None, repr=False)
    _task: Any = field(default=None, repr=False)
    _shown: float = field(default=0.0, repr=False)
    _began: float = field(default_factory=lambda: time.monotonic(), repr=False)
    _before: float | None = field(default=None, repr=False)
    """Work that was done before the pace was measured."""
    _pace_began: float = field(default_factory=lambda: time.monotonic(), repr=False)

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """Add to the work done.

        Args:
            amount: work done since the last call.
            note: text behind the bar.
        """
        self.update(self.done + amount, note=note)

    def begin_pace(self, done: float) -> None:
        """Measure the pace from now on; the work done so far was preparation."""
        self._before = done
        self._pace_began = time.monotonic()

    def update(self, done: float, *, total: float | None = None, note: str | None = None) -> None:
        """Set the work done.

        Args:
            done: work done so far.
            total: work to do, if it has changed.
            note: text behind the bar.
        """
        if self._before is None:
            self._before = done
        is_news = note not in (None, self.note) and done == self.done  # another part of the work has started
        self.done = done
        self.total = total if total is not None else self.total
        self.note = note if note is not None else self.note
        if self._live is not None:
            self._live.update(self._task, completed=self.done, total=self.total, note=self.note)
        elif is_news or time.monotonic() - self._shown >= LOG_SECONDS:
            self._say()

    def _say(self, last: bool = False) -> None:
        self._shown = time.monotonic()
        total = f"/{_number(self.total)}" if self.total else ""
        timing = f"{self._shown - self._began:.1f} s" if last else self._left()
        line = f"{self.title}: {_number(self.done)}{total} {self.unit}  {', '.join(filter(None, (self.note, timing)))}"
        console.print(line.rstrip(), markup=False)

    def _left(self) -> str:
        """Return the time left at the pace so far; "" while it is unknown."""
        measured = self.done - (self._before or 0)
        if not self.total or measured <= 0 or self.done >= self.total:
            return ""
        return f"{duration((self._shown - self._pace_began) / measured * (self.total - self.done))} left"


def duration(seconds: float) -> str:
    """Format seconds: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:g}"


@contextlib.contextmanager
def bars() -> Iterator[Bars]:
    """Yield a group of progress bars that are drawn together."""
    group = Bars(None)
    if console.is_terminal:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.table import Column

        def fixed(width: int) -> Column:
            """Return a column that a narrow terminal does not shrink: the note is cut first."""
            return Column(no_wrap=True, min_width=width)

        elapsed = [TimeElapsedColumn(fixed(7))] if console.width >= 100 else []
        with Progress(SpinnerColumn(), TextColumn("{task.description:<32}", table_column=fixed(32)),
                      BarColumn(bar_width=12, table_column=fixed(8)),
                      TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}", table_column=fixed(9)),
                      *elapsed, TimeRemainingColumn(table_column=fixed(7)), TextColumn("left", table_column=fixed(4)),
                      TextColumn("[dim]{task.fields[note]}"), console=console, refresh_per_second=4) as live:
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
        """Yield a bar, which stays on the screen at its final value.

        Args:
            title: text before the bar.
            total: work to do, if it is known.
            unit: unit of the work.
        """
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
    """Print rows with equal keys as a table. Numbers are aligned right.

    Outside a terminal each row is one line. On a narrow terminal wide columns of text fold; the others keep their
    width, and lines may be longer than the screen.

    Args:
        rows: cells by title.
        title: text above the table.
        to: where to print; default: standard output.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    cells = [[_cell(value) for value in row.values()] for row in rows]
    stream = to.file if to is not None else sys.stdout
    is_terminal = to.is_terminal if to is not None else sys.stdout.isatty()
    least = 0
    for index, key in enumerate(rows[0] if rows else ["nothing"]):
        width = max(map(cell_len, [str(key), *(row[index] for row in cells)]))
        folds = is_terminal and width > FOLDED
        right = bool(rows) and cells[0][index].replace(",", "").replace(".", "").isdigit()
        table.add_column(key, justify="right" if right else "left", overflow="fold", no_wrap=not folds,
                         min_width=FOLDED if folds else width)
        least += (FOLDED if folds else width) + _GAP
    for row in cells:
        table.add_row(*map(Text, row))  # a document's text is no markup
    target = Output(file=stream, highlight=False, force_terminal=is_terminal or None)
    target.width = max(target.width if is_terminal else 0, least)
    if title:  # rich folds a table's own title at the table's width
        target.print(Text(title, style="table.title"), soft_wrap=True)
    target.print(table)


_GAP = 2


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else printable_lines(str(value))
