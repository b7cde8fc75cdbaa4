"""Measures of texts that filters request and `textpass.measure` makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tidewheel.data import text
from tidewheel.versions import Version

if TYPE_CHECKING:
    import numpy as np

VERSION = Version("text_measures", 2, uses=(text.VERSION,))
"""Version of the counts and hashes of a pass over texts."""
PHRASES = ("javascript", "lorem ipsum", "terms of use", "privacy policy", "cookie policy", "uses cookies",
           "use of cookies", "use cookies")
"""Phrases that the rules of `LineRules` search for."""
TOKEN_COUNTS = ("tokens", "symbol_tokens", "word_characters", "alphabetic_words", "stop_words",
                "hashes", "ellipses", "lines", "bullet_lines", "ellipsis_lines")
TOP, DUPLICATE = (2, 3, 4), (5, 6, 7, 8, 9, 10)
REPETITION = ("characters", "lines", "duplicate_lines", "duplicate_line_characters",
              "paragraphs", "duplicate_paragraphs", "duplicate_paragraph_characters",
              *(f"top_{n}_gram" for n in TOP), *(f"duplicate_{n}_grams" for n in DUPLICATE))
LINE_COUNTS = ("lines", "terminal_lines", "short_lines", "duplicate_line_characters", "characters", "newlines")
"""Columns of the counts, as `TOKEN_COUNTS` and `REPETITION`."""


class LineShape(NamedTuple):
    """Settings for counting lines.

    Args:
        terminal_punctuation: characters that end a sentence at the end of a line.
        short_line: maximum number of characters of a short line.
    """

    terminal_punctuation: str
    short_line: int


class LineRules(NamedTuple):
    """Rules that cut lines and drop documents; the filter `c4` documents each."""

    terminal_punctuation: bool
    min_sentences: int
    min_words_per_line: int
    max_word_length: int
    remove_citations: bool
    javascript: bool
    policy: bool
    lorem_ipsum: bool
    curly_bracket: bool


@dataclass(frozen=True)
class Measures:
    """Requested measures; each is a field of `textpass.Measured`.

    Args:
        token_counts: count tokens by kind in each document (`TOKEN_COUNTS`).
        repetition: count characters in repeated lines, paragraphs and n-grams (`REPETITION`).
        line_counts: count lines by kind (`LINE_COUNTS`).
        kept_lines: cut lines by these rules.
    """

    token_counts: bool = False
    repetition: bool = False
    line_counts: LineShape | None = None
    kept_lines: LineRules | None = None

    def asked(self) -> dict[str, Any]:
        """Return the requested fields."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name))}

    def covers(self, other: Measures) -> bool:
        """Return whether these measures include all measures that `other` requests."""
        own = self.asked()
        return all(own.get(name) == value for name, value in other.asked().items())

    @classmethod
    def of_all(cls, several: Iterable[Measures | None]) -> Measures:
        """Return all requested measures; if several request a field with different settings, the first decides."""
        requested: dict[str, Any] = {}
        for measures in several:
            if measures is not None:
                requested = {**measures.asked(), **requested}
        return cls(**requested)


@lru_cache(maxsize=1)
def phrases() -> np.ndarray:
    """Return first eight bytes, last eight bytes and length of each of `PHRASES`, uint64 [8, 3]."""
    import numpy as np

    raw = [phrase.encode() for phrase in PHRASES]
    return np.array([[int.from_bytes(word[:8], "little"), int.from_bytes(word[-8:], "little"), len(word)]
                     for word in raw], np.uint64)
