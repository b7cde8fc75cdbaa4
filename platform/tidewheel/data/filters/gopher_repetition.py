"""Gopher repetition rules (Rae et al. 2021, section A1.1 and table A1; definitions as in FineWeb / datatrove).

The rules apply to the text without dropped characters (`unicode_table`) and with "\\r\\n" replaced by "\\n".
Characters are code points of that text, and shares of characters refer to all of them.

- White space at both ends of the text is removed. Then lines are split at newlines (a run counts once), paragraphs at
  runs of two or more. (For lines datatrove keeps the white space, and counts an empty line at either end.) A line or
  paragraph equal to an earlier one is a duplicate.
- Words are the tokens of `gopher_quality`, symbols included. Case matters.
- The top n-gram is the most frequent one; of equally frequent ones, the first. It counts with its characters,
  including one space between words, times its occurrences. If no n-gram repeats, the first n-gram is the top one.
- Duplicate n-grams are counted from left to right: the words of an n-gram that occurred before count with their
  characters, and the scan continues after it, so that no character counts twice.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tidewheel.data.filter import Batch, Filter, Limits, Verdicts
from tidewheel.data.text.measures import REPETITION, Measures
from tidewheel.data.text.measures import VERSION as MEASURES
from tidewheel.data.thresholds import MOST, Rule, first_failing
from tidewheel.versions import Version


class GopherRepetition(Filter):
    """Gopher's repetition rules on duplicate lines and paragraphs, and on frequent and repeated n-grams.

    A share equal to a threshold is kept.
    """

    VERSION: ClassVar[Version | None] = Version("filter_gopher_repetition", uses=(MEASURES,))
    ORDER: ClassVar[int] = 30

    max_duplicate_paragraphs: float = 0.30
    """Maximum share of paragraphs that repeat an earlier one."""
    max_duplicate_paragraph_characters: float = 0.20
    """Maximum share of characters in such paragraphs."""
    max_duplicate_lines: float = 0.30
    """Maximum share of lines that repeat an earlier one."""
    max_duplicate_line_characters: float = 0.20
    """Maximum share of characters in such lines."""
    max_top_2_gram: float = 0.20
    """Maximum share of characters in the most frequent pair of words."""
    max_top_3_gram: float = 0.18
    """The same for three words."""
    max_top_4_gram: float = 0.16
    """The same for four words."""
    max_duplicate_5_grams: float = 0.15
    """Maximum share of characters in repeated sequences of five words."""
    max_duplicate_6_grams: float = 0.14
    """The same for six words."""
    max_duplicate_7_grams: float = 0.13
    """The same for seven words."""
    max_duplicate_8_grams: float = 0.12
    """The same for eight words."""
    max_duplicate_9_grams: float = 0.11
    """The same for nine words."""
    max_duplicate_10_grams: float = 0.10
    """The same for ten words."""

    def limits(self) -> Limits:
        """Return the maximum share by statistic."""
        return {name: (None, getattr(self, f"max_{name}")) for name in STATISTICS}

    def measures(self) -> Measures:
        """Request repeated lines, paragraphs and n-grams."""
        return Measures(repetition=True)

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents.

        Returns:
            One of `REASONS` for each dropped document; statistics: those of `STATISTICS`, 0 for an empty document.
        """
        counts = batch.measure(self.measures()).repetition
        assert counts is not None
        statistics = _statistics(counts)
        return Verdicts(first_failing(statistics, self.limits(), _RULES), statistics)


# in the order in which the rules are applied
STATISTICS = tuple(name.removeprefix("max_") for name in GopherRepetition.model_fields)
_RULES: tuple[Rule, ...] = tuple((name, MOST, f"gopher_{name}") for name in STATISTICS)
REASONS = tuple(reason for _, _, reason in _RULES)


def _statistics(counts: np.ndarray) -> dict[str, np.ndarray]:
    column = {name: counts[:, index].astype(np.float64) for index, name in enumerate(REPETITION)}
    totals = {"duplicate_lines": "lines", "duplicate_paragraphs": "paragraphs"}
    return {name: column[name] / np.maximum(column[totals.get(name, "characters")], 1) for name in STATISTICS}
