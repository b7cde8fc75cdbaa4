"""Gopher repetition rules (Rae et al. 2021, section A1.1 and table A1; definitions as in FineWeb / datatrove).

The document is taken without dropped characters (`unicode_table`) and with "\\r\\n" as "\\n"; characters are
code points of that text, and shares of characters are of all of them.

- Lines are cut at newlines (a run of them counts once), paragraphs at runs of two or more, after white space at
  both ends of the text is gone (datatrove leaves it for lines, and counts an empty line at either end).
  One equal to an earlier one is a duplicate.
- Words are the tokens of `gopher_quality`, symbols included, as they are written (case matters).
- Top n-gram: the one that occurs most often, the first seen of equals; its characters, with one space between
  words, times its occurrences. A text in which no n-gram repeats has its first as top n-gram.
- Duplicate n-grams: read from left to right, the words of an n-gram that was met before count with their characters,
  and reading goes on behind it, so that no character counts twice.
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
    """The repetition rules of Gopher: duplicate lines and paragraphs, frequent and repeated n-grams. A share equal to a
    threshold is kept."""

    VERSION: ClassVar[Version | None] = Version("filter_gopher_repetition", uses=(MEASURES,))
    ORDER: ClassVar[int] = 30

    max_duplicate_paragraphs: float = 0.30
    """Largest share of paragraphs that repeat an earlier one."""
    max_duplicate_paragraph_characters: float = 0.20
    """Largest share of characters in such paragraphs."""
    max_duplicate_lines: float = 0.30
    """Largest share of lines that repeat an earlier one."""
    max_duplicate_line_characters: float = 0.20
    """Largest share of characters in such lines."""
    max_top_2_gram: float = 0.20
    """Largest share of characters in the most frequent pair of words."""
    max_top_3_gram: float = 0.18
    """The same for three words."""
    max_top_4_gram: float = 0.16
    """The same for four words."""
    max_duplicate_5_grams: float = 0.15
    """Largest share of characters in repeated runs of five words."""
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
        """Return the largest share by statistic."""
        return {name: (None, getattr(self, f"max_{name}")) for name in STATISTICS}

    def measures(self) -> Measures:
        """Ask for repeated lines, paragraphs and n-grams."""
        return Measures(repetition=True)

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents.

        Returns:
            One of `REASONS` for each document that goes; statistics: those of `STATISTICS`, 0 for an empty document.
        """
        counts = batch.measure(self.measures()).repetition
        assert counts is not None
        statistics = _statistics(counts)
        return Verdicts(first_failing(statistics, self.limits(), _RULES), statistics)


# in the order in which rules are tried
STATISTICS = tuple(name.removeprefix("max_") for name in GopherRepetition.model_fields)
_RULES: tuple[Rule, ...] = tuple((name, MOST, f"gopher_{name}") for name in STATISTICS)
REASONS = tuple(reason for _, _, reason in _RULES)


def _statistics(counts: np.ndarray) -> dict[str, np.ndarray]:
    column = {name: counts[:, place].astype(np.float64) for place, name in enumerate(REPETITION)}
    of = {"duplicate_lines": "lines", "duplicate_paragraphs": "paragraphs"}
    return {name: column[name] / np.maximum(column[of.get(name, "characters")], 1) for name in STATISTICS}
