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

from tidewheel.printable import printable_lines

WIDTH = 140
"""Columns of what goes to a file or a pipe."""
LOG_SECONDS = 5.0
"""Between two lines of one bar in a log."""
FOLDED = 20
"""Columns of a table that are wider may fold where a terminal is too narrow; the others never do."""



class Output(Console):
    """What a command prints. When the reader has seen enough, `head` for one, the command ends as it does for `print`:
    rich by itself would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        """Raise what `print` raises."""
        raise BrokenPipeError


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
    _began: float = field(default_factory=lambda: time.monotonic(), repr=False)
    _before: float | None = field(default=None, repr=False)
    """What was done already when the pace began: it says nothing about the pace."""
    _pace_began: float = field(default_factory=lambda: time.monotonic(), repr=False)

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """`amount` more is done."""
        self.update(self.done + amount, note=note)

    def begin_pace(self, done: float) -> None:
        """Measure the pace from now on, with `done` done: what came before was preparation."""
        self._before, self._pace_began = done, time.monotonic()

    def update(self, done: float, *, total: float | None = None, note: str | None = None) -> None:
        """`done` of the total is done; `note` is shown behind the bar."""
        if self._before is None:
            self._before = done
        is_news = note not in (None, self.note) and done == self.done  # another part of the work has begun
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
        told = f"{self._shown - self._began:.1f} s" if last else self._left()
        line = f"{self.title}: {_number(self.done)}{total} {self.unit}  {', '.join(filter(None, (self.note, told)))}"
        console.print(line.rstrip(), markup=False)

    def _left(self) -> str:
        """How long the rest takes at the pace so far; "" while nothing is known."""
        here = self.done - (self._before or 0)
        if not self.total or here <= 0 or self.done >= self.total:
            return ""
        return f"{duration((self._shown - self._pace_began) / here * (self.total - self.done))} left"


def duration(seconds: float) -> str:
    """A time for people: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:g}"


@contextlib.contextmanager
def bars() -> Iterator[Bars]:
    """A group of progress bars, drawn together."""
    group = Bars(None)
    if console.is_terminal:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.table import Column

        def fixed(width: int) -> Column:
            """What a narrow terminal does not squash: the note is cut first."""
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
    """Rows of equal keys as a table; on standard output unless `to` says otherwise. Numbers stand on the right.

    Outside a terminal a row is a line, however long. On a terminal that is too narrow the wide columns of text fold;
    the others keep their width, and lines may be longer than the screen.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    cells = [[_cell(value) for value in row.values()] for row in rows]
    stream = to.file if to is not None else sys.stdout
    is_terminal = to.is_terminal if to is not None else sys.stdout.isatty()
    least = 0
    for place, key in enumerate(rows[0] if rows else ["nothing"]):
        width = max(map(cell_len, [str(key), *(row[place] for row in cells)]))
        folds = is_terminal and width > FOLDED
        right = bool(rows) and cells[0][place].replace(",", "").replace(".", "").isdigit()
        table.add_column(key, justify="right" if right else "left", overflow="fold", no_wrap=not folds,
                         min_width=FOLDED if folds else width)
        least += (FOLDED if folds else width) + _GAP
    for row in cells:
        table.add_row(*map(Text, row))  # what a document says is no markup
    target = Output(file=stream, highlight=False, force_terminal=is_terminal or None)
    target.width = max(target.width if is_terminal else 0, least)
    if title:  # a table's own title folds at the width of the table
        target.print(Text(title, style="table.title"), soft_wrap=True)
    target.print(table)


_GAP = 2


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else printable_lines(str(value))
