"""FineWeb's own quality rules (Penedo et al. 2024; definitions as in datatrove).

The rules apply to the text without dropped characters (`unicode_table`) and with "\\r\\n" replaced by "\\n".
Characters are code points of that text. Lines are split at each newline; blank lines do not count. Words are the tokens
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
    """FineWeb's own rules on line ends, short and repeated lines, and lists. A value equal to a threshold is kept."""

    VERSION: ClassVar[Version | None] = Version("filter_fineweb", uses=(MEASURES,))
    ORDER: ClassVar[int] = 60

    terminal_punctuation: str = SENTENCE_ENDS
    """Characters that end a sentence at the end of a line. The default is the set of datatrove since FineWeb2, with all
    scripts; FineWeb itself used . ! ? " and '."""
    min_terminal_lines: float = 0.12
    """Minimum share of lines that end in one of these characters."""
    short_line: int = 30
    """Maximum number of characters in a short line."""
    max_short_lines: float = 0.67
    """Maximum share of short lines."""
    max_duplicate_line_characters: float = 0.01
    """Maximum share of characters (except newlines) in lines that repeat an earlier one. FineWeb2 uses 0.1."""
    max_newlines_per_word: float = 0.3
    """Maximum number of newlines per word; a text with more is considered a list."""

    def limits(self) -> Limits:
        """Return the thresholds by statistic."""
        return {
            "fineweb_terminal_lines": (self.min_terminal_lines, None),
            "fineweb_short_lines": (None, self.max_short_lines),
            "fineweb_duplicate_line_characters": (None, self.max_duplicate_line_characters),
            "fineweb_newlines_per_word": (None, self.max_newlines_per_word),
        }

    def measures(self) -> Measures:
        """Request counts of lines."""
        return Measures(line_counts=LineShape(self.terminal_punctuation, self.short_line))

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents.

        Returns:
            One of `REASONS` for each dropped document; statistics: the keys of `limits`. All are 0 for a document
            without lines, which is therefore dropped for too few terminal lines.
        """
        measured = batch.measure(self.measures())
        counts = measured.line_counts
        words = measured.tokens
        assert counts is not None
        column = {name: counts[:, index].astype(np.float64) for index, name in enumerate(LINE_COUNTS)}
        lines = np.maximum(column["lines"], 1)
        characters = np.maximum(column["characters"], 1)
        statistics = {
            "fineweb_terminal_lines": column["terminal_lines"] / lines,
            "fineweb_short_lines": column["short_lines"] / lines,
            "fineweb_duplicate_line_characters": column["duplicate_line_characters"] / characters,
            "fineweb_newlines_per_word": np.where(words > 0, column["newlines"] / np.maximum(words, 1), 0),
        }
        return Verdicts(first_failing(statistics, self.limits(), _RULES), statistics)


# in the order in which the rules are applied
_RULES: tuple[Rule, ...] = (
    ("fineweb_terminal_lines", LEAST, "fineweb_too_few_terminal_lines"),
    ("fineweb_short_lines", MOST, "fineweb_too_many_short_lines"),
    ("fineweb_duplicate_line_characters", MOST, "fineweb_duplicate_lines"),
    ("fineweb_newlines_per_word", MOST, "fineweb_too_many_newlines"),
)
REASONS = tuple(reason for _, _, reason in _RULES)
