"""The line rules of RefinedWeb (Penedo et al. 2023, appendix G.2), thresholds as in DCLM-Baseline (Li et al. 2024).

The rules remove lines that are mostly upper case, only digits, counters ("3 likes") or one word. They cut menu phrases
out of short lines, and remove a line that has nothing else. A document that loses too many of its words is dropped.
Lines end at "\\n"; blank lines stay. If a document loses anything, white space at its ends is removed too.

Words are separated by white space; characters are code points, with the classes of `unicode_table`. DCLM treats the
phrase "Read more..." as a pattern whose dots match any character; here they match only dots.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field, field_validator

from tidewheel.data import text
from tidewheel.data.filter import Batch, Filter, Limits, Verdicts
from tidewheel.versions import Version

if TYPE_CHECKING:
    import pyarrow as pa

    from tidewheel.data.text import Texts

REASON = "refinedweb_too_many_words_removed"
#: Words that a counter counts.
COUNTED = ("likes", "shares", "comments", "retweets", "reposts", "quotes", "bookmarks", "upvotes", "downvotes",
           "downloads", "views", "followers")
COUNTS = ("words", "words_left", "removed_lines", "cut_phrases")
ANYWHERE, AT_END, AT_START = 0, 1, 2


class RefinedWeb(Filter):
    """RefinedWeb's line rules as in DCLM. They remove lines in upper case, of digits or of one word, counters and menu
    phrases.

    They drop documents that lose too many words. A value equal to a threshold is kept.
    """

    VERSION: ClassVar[Version | None] = Version("filter_refinedweb", uses=(text.VERSION,))
    ORDER: ClassVar[int] = 70
    EDITS: ClassVar[str] = "refinedweb_lines"
    DETAILS: ClassVar[tuple[str, ...]] = ("refinedweb_removed_lines", "refinedweb_cut_phrases")
    KERNELS: ClassVar[tuple[str, ...]] = ("tidewheel.data.filters.kernels.refinedweb",)

    max_uppercase: float = Field(default=0.5, ge=0, le=1)
    """Maximum share of upper-case characters in a line."""
    max_digits: float = Field(default=0.999999, ge=0, le=1)
    """Maximum share of digits in a line."""
    counters: bool = True
    """Remove lines that only count likes, shares, views and the like."""
    min_line_words: int = Field(default=2, ge=0)
    """Minimum number of words in a line."""
    short_line_words: int = Field(default=10, ge=0)
    """Maximum number of words in a line from which phrases are cut."""
    phrases: tuple[str, ...] = ("items in cart",)
    """Phrases to cut anywhere in a short line; ASCII, in upper or lower case."""
    end_phrases: tuple[str, ...] = ("read more...",)
    """Phrases to cut at the end of a short line."""
    start_phrases: tuple[str, ...] = ("sign-in",)
    """Phrases to cut at the start of a short line."""
    max_removed_words: float = Field(default=0.05, ge=0, le=1)
    """Maximum share of its words that a document may lose."""

    @field_validator("phrases", "end_phrases", "start_phrases")
    @classmethod
    def _ascii(cls, phrases: tuple[str, ...]) -> tuple[str, ...]:
        for phrase in phrases:
            if not phrase or not phrase.isascii() or "\n" in phrase:
                raise ValueError(f"{phrase!r} is not a phrase: give ASCII characters without a newline")
        return phrases

    def limits(self) -> Limits:
        """Return the largest share of words removed."""
        return {"refinedweb_removed_words": (None, self.max_removed_words), "refinedweb_removed_lines": (None, None),
                "refinedweb_cut_phrases": (None, None)}

    def apply(self, batch: Batch) -> Verdicts:
        """Edit and judge documents.

        Returns:
            `REASON` for each dropped document; statistics: refinedweb_removed_words, a share; refinedweb_removed_lines
            and refinedweb_cut_phrases, counts; and the texts without the removed lines and phrases.
        """
        counts, edited = remove_lines(batch.texts, self)
        column = {name: counts[:, index].astype(np.float64) for index, name in enumerate(COUNTS)}
        removed = (column["words"] - column["words_left"]) / np.maximum(column["words"], 1)
        reasons = [REASON if share > self.max_removed_words else "" for share in removed.tolist()]
        return Verdicts(reasons, {"refinedweb_removed_words": removed,
                                  "refinedweb_removed_lines": column["removed_lines"],
                                  "refinedweb_cut_phrases": column["cut_phrases"]}, edited)


def remove_lines(texts: Texts, config: RefinedWeb) -> tuple[np.ndarray, pa.LargeStringArray]:
    """Remove lines and phrases. Return (int64 [texts, 4] with the columns `COUNTS`, the remaining texts)."""
    import pyarrow as pa

    from tidewheel.data.filters.kernels import refinedweb as kernels
    from tidewheel.data.text import unicode_table

    data, offsets = text.buffers(texts)
    entries, _ = unicode_table.load()
    counts = np.zeros((len(offsets) - 1, len(COUNTS)), np.int64)
    counted, counted_ends = _blob(COUNTED if config.counters else ())
    phrases, phrase_ends = _blob((*config.phrases, *config.end_phrases, *config.start_phrases))
    positions = text.frozen(np.repeat(np.array([ANYWHERE, AT_END, AT_START]),
                                   [len(config.phrases), len(config.end_phrases), len(config.start_phrases)]))
    parts = []
    for first, last in text.chunks(offsets):
        out = np.empty(int(offsets[last] - offsets[first]), np.uint8)
        bounds = np.zeros(last - first + 1, np.int64)
        kernels.remove_lines(data, offsets, first, last, entries, _ascii_flags(), config.max_uppercase,
                             config.max_digits, config.min_line_words, config.short_line_words, counted, counted_ends,
                             phrases, phrase_ends, positions, out, bounds, counts[first:last])
        parts.append(pa.LargeStringArray.from_buffers(last - first, pa.py_buffer(bounds),
                                                      pa.py_buffer(out[: bounds[-1]])))
    return counts, pa.concat_arrays(parts) if parts else pa.array([], pa.large_string())


@lru_cache(maxsize=16)
def _blob(phrases: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return (lower-case bytes uint8, ends int64 [len(phrases)]), both read-only."""
    raw = [phrase.lower().encode() for phrase in phrases]
    ends = np.cumsum([len(phrase) for phrase in raw], dtype=np.int64)
    return text.frozen(np.frombuffer(b"".join(raw), np.uint8)), text.frozen(ends)


@lru_cache(maxsize=1)
def _ascii_flags() -> np.ndarray:
    """Return the kernel's flags for each ASCII byte, uint8 [256]."""
    from tidewheel.data.filters.kernels.refinedweb import DIGIT_FLAG, SPACE_FLAG, UPPER_FLAG

    flags = np.zeros(256, np.uint8)
    for byte in range(128):
        character = chr(byte)
        flags[byte] = (UPPER_FLAG * character.isupper() + DIGIT_FLAG * character.isdigit()
                       + SPACE_FLAG * character.isspace())
    return text.frozen(flags)
