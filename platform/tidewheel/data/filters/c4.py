"""C4's rules (Raffel et al. 2020, section 2.2; definitions as in FineWeb / datatrove), which remove lines.

Lines are split at newlines and stripped of white space. The rules remove a line, in this order, if one of its words
(separated by white space) is too long; if, without citations, it does not end a sentence; if it has too few words; or
if it mentions "javascript" or a policy. They drop the document if a remaining line contains "lorem ipsum" or a curly
bracket, or if the remaining lines have too few sentences. A sentence ends at a token of `gopher_quality` that is one of
. ! ? or their equivalents in other scripts, and the next sentence begins with the next token that is not punctuation.
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
    """C4's rules. They remove lines that do not end a sentence, are too short, or are about cookies and JavaScript.

    They drop documents with "lorem ipsum", a curly bracket or too few sentences. A value equal to a threshold is kept.
    FineWeb uses these rules with `terminal_punctuation=False`.
    """

    VERSION: ClassVar[Version | None] = Version("filter_c4", 2, uses=(MEASURES,))
    ORDER: ClassVar[int] = 50
    EDITS: ClassVar[str] = "c4_lines"
    DETAILS: ClassVar[tuple[str, ...]] = ("c4_removed_lines",)

    terminal_punctuation: bool = True
    """Remove lines that do not end in . ? ! " or ', and lines that end in an ellipsis. FineWeb keeps them."""
    min_sentences: int = 5
    """Minimum number of sentences in the remaining lines of a document."""
    min_words_per_line: int = 3
    """Minimum number of words in a line."""
    max_word_length: int = 1000
    """Maximum number of characters in a word; remove lines with a longer one."""
    remove_citations: bool = True
    """Remove [1], [], [edit] and [citation needed] from lines."""
    javascript: bool = True
    """Remove lines with "javascript"."""
    policy: bool = True
    """Remove lines about terms of use, privacy and cookies."""
    lorem_ipsum: bool = True
    """Drop documents with "lorem ipsum"."""
    curly_bracket: bool = True
    """Drop documents with a curly bracket."""

    def limits(self) -> Limits:
        """Return the minimum number of sentences."""
        return {"c4_sentences": (self.min_sentences, None), "c4_kept_lines": (None, None),
                "c4_removed_lines": (None, None)}

    def measures(self) -> Measures:
        """Request the remaining lines."""
        return Measures(kept_lines=LineRules(**{name: getattr(self, name) for name in LineRules._fields}))

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents and remove lines.

        Returns:
            One of `REASONS` for each dropped document; statistics: c4_sentences (sentences in the remaining lines, up
            to the line that dropped the document), c4_kept_lines (share of the lines with words) and c4_removed_lines
            (their number); and the texts without the removed lines. Dropped documents keep their texts.
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
        return Verdicts([reasons[code] for code in counts[:, 3]], statistics, measured.edited)
