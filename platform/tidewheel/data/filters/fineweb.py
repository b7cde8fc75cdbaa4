"""FineWeb's own quality rules (Penedo et al. 2024; definitions as in datatrove).

The document is taken without dropped characters (`unicode_table`) and with "\\r\\n" as "\\n"; characters are
code points of that text. Lines are cut at each newline; those of white space alone do not count. Words are the tokens
of `gopher_quality`, symbols included.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tidewheel.data.filter import Batch, Filter, Limits, Verdicts
from tidewheel.data.text.measures import LINE_COUNTS, LineShape, Measures
from tidewheel.data.text.measures import VERSION as MEASURES
from tidewheel.data.text.token_table import SENTENCE_ENDS
from tidewheel.data.thresholds import LEAST, MOST, Rule, first_failing
from tidewheel.versions import Version


class FineWeb(Filter):
    """FineWeb's own rules: ends of lines, short and repeated lines, lists. A value equal to a threshold is kept."""

    VERSION: ClassVar[Version | None] = Version("filter_fineweb", uses=(MEASURES,))
    ORDER: ClassVar[int] = 60

    terminal_punctuation: str = SENTENCE_ENDS
    """Characters that end a sentence when they are the last of a line: those of all scripts, as datatrove has it since
    FineWeb2. FineWeb itself was made with . ! ? " and '."""
    min_terminal_lines: float = 0.12
    """Smallest share of lines that end in one of them."""
    short_line: int = 30
    """Most characters of a short line."""
    max_short_lines: float = 0.67
    """Largest share of short lines."""
    max_duplicate_line_characters: float = 0.01
    """Largest share of characters (newlines aside) in lines that repeat an earlier one. FineWeb2 takes 0.1."""
    max_newlines_per_word: float = 0.3
    """Most newlines per word; more are taken for a list."""

    def limits(self) -> Limits:
        """Return the thresholds by statistic."""
        return {
            "fineweb_terminal_lines": (self.min_terminal_lines, None),
            "fineweb_short_lines": (None, self.max_short_lines),
            "fineweb_duplicate_line_characters": (None, self.max_duplicate_line_characters),
            "fineweb_newlines_per_word": (None, self.max_newlines_per_word),
        }

    def measures(self) -> Measures:
        """Ask for counts of lines."""
        return Measures(line_counts=LineShape(self.terminal_punctuation, self.short_line))

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents.

        Returns:
            One of `REASONS` for each document that goes; statistics: the keys of `limits`. All are 0 for a document
            without lines, which therefore has too few terminal ones.
        """
        measured = batch.measure(self.measures())
        counts, words = measured.line_counts, measured.tokens
        assert counts is not None
        column = {name: counts[:, place].astype(np.float64) for place, name in enumerate(LINE_COUNTS)}
        lines = np.maximum(column["lines"], 1)
        characters = np.maximum(column["characters"], 1)
        statistics = {
            "fineweb_terminal_lines": column["terminal_lines"] / lines,
            "fineweb_short_lines": column["short_lines"] / lines,
            "fineweb_duplicate_line_characters": column["duplicate_line_characters"] / characters,
            "fineweb_newlines_per_word": np.where(words > 0, column["newlines"] / np.maximum(words, 1), 0),
        }
        return Verdicts(first_failing(statistics, self.limits(), _RULES), statistics)


# in the order in which rules are tried
_RULES: tuple[Rule, ...] = (
    ("fineweb_terminal_lines", LEAST, "fineweb_too_few_terminal_lines"),
    ("fineweb_short_lines", MOST, "fineweb_too_many_short_lines"),
    ("fineweb_duplicate_line_characters", MOST, "fineweb_duplicate_lines"),
    ("fineweb_newlines_per_word", MOST, "fineweb_too_many_newlines"),
)
REASONS = tuple(reason for _, _, reason in _RULES)
