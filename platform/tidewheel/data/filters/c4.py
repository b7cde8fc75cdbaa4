"""C4's rules (Raffel et al. 2020, section 2.2; definitions as in FineWeb / datatrove). They remove lines.

Lines are cut at newlines and bare of white space at both ends. In this order a line goes when one of its words (what
white space separates) is too long; when, without citations, it does not end a sentence; when it has too few words; when
it mentions "javascript", or a policy. A line that is still there with "lorem ipsum" or a curly bracket drops the
document; so do too few sentences in the lines that stay. Sentences end at a token of `gopher_quality` that is one of
. ! ? and their like in other scripts, and begin with the next one that is not punctuation.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tidewheel.data.filter import Batch, Filter, Limits, Verdicts
from tidewheel.data.text.measures import VERSION as MEASURES
from tidewheel.data.text.measures import LineRules, Measures
from tidewheel.versions import Version

REASONS = ("c4_lorem_ipsum", "c4_curly_bracket", "c4_too_few_sentences")


class C4(Filter):
    """C4's rules: lines that end no sentence, are too short, or are about cookies and JavaScript are removed; documents
    with "lorem ipsum", a curly bracket or too few sentences go. A value equal to a threshold is kept. FineWeb has these
    rules with `terminal_punctuation=False`."""

    VERSION: ClassVar[Version | None] = Version("filter_c4", 2, uses=(MEASURES,))
    ORDER: ClassVar[int] = 50
    EDITS: ClassVar[str] = "c4_lines"
    DETAILS: ClassVar[tuple[str, ...]] = ("c4_removed_lines",)

    terminal_punctuation: bool = True
    """Remove lines that do not end in . ? ! " or ', and those that end in an ellipsis. FineWeb does not."""
    min_sentences: int = 5
    """Fewest sentences of a document, in the lines that stay."""
    min_words_per_line: int = 3
    """Fewest words of a line."""
    max_word_length: int = 1000
    """Most characters of a word; a line with a longer one is removed."""
    remove_citations: bool = True
    """Cut [1], [], [edit] and [citation needed] out of lines."""
    javascript: bool = True
    """Remove lines with "javascript"."""
    policy: bool = True
    """Remove lines about terms of use, privacy and cookies."""
    lorem_ipsum: bool = True
    """Drop documents with "lorem ipsum"."""
    curly_bracket: bool = True
    """Drop documents with a curly bracket."""

    def limits(self) -> Limits:
        """Return the fewest sentences."""
        return {"c4_sentences": (self.min_sentences, None), "c4_kept_lines": (None, None),
                "c4_removed_lines": (None, None)}

    def measures(self) -> Measures:
        """Ask for the lines that stay."""
        return Measures(kept_lines=LineRules(**{name: getattr(self, name) for name in LineRules._fields}))

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents and remove lines.

        Returns:
            One of `REASONS` for each document that goes; statistics: c4_sentences (those in the lines that stay, up to
            what dropped the document), c4_kept_lines (share of the lines that have words) and c4_removed_lines (their
            number); and the texts without the lines that go, of a dropped document as it was.
        """
        measured = batch.measure(self.measures())
        counts = measured.kept_lines
        assert counts is not None
        reasons = ("", *REASONS)
        statistics = {
            "c4_sentences": counts[:, 2].astype(np.float64),
            "c4_kept_lines": np.minimum(counts[:, 1] / np.maximum(counts[:, 0], 1), 1.0),
            "c4_removed_lines": np.maximum(counts[:, 0] - counts[:, 1], 0).astype(np.float64),
        }
        return Verdicts([reasons[number] for number in counts[:, 3]], statistics, measured.edited)
