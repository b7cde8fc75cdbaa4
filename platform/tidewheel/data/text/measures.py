"""What one pass over a text can be asked for: `textpass.measure` takes it, filters say what they need of it."""

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
"""What one pass over a text counts and hashes."""
PHRASES = ("javascript", "lorem ipsum", "terms of use", "privacy policy", "cookie policy", "uses cookies",
           "use of cookies", "use cookies")
"""What the rules of `LineRules` look for."""
TOKEN_COUNTS = ("tokens", "symbol_tokens", "word_characters", "alphabetic_words", "stop_words",
                "hashes", "ellipses", "lines", "bullet_lines", "ellipsis_lines")
TOP, DUPLICATE = (2, 3, 4), (5, 6, 7, 8, 9, 10)
REPETITION = ("characters", "lines", "duplicate_lines", "duplicate_line_characters",
              "paragraphs", "duplicate_paragraphs", "duplicate_paragraph_characters",
              *(f"top_{n}_gram" for n in TOP), *(f"duplicate_{n}_grams" for n in DUPLICATE))
LINE_COUNTS = ("lines", "terminal_lines", "short_lines", "duplicate_line_characters", "characters", "newlines")
"""Columns of what is counted, here and above."""


class LineShape(NamedTuple):
    """What lines are counted by.

    Args:
        terminal_punctuation: characters that end a sentence when they are the last of a line.
        short_line: most characters of a short line.
    """

    terminal_punctuation: str
    short_line: int


class LineRules(NamedTuple):
    """Rules by which lines stay or go, and documents with them; the filter `c4` tells each."""

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
    """What a pass is to find; each field is one of `textpass.Measured`.

    Args:
        token_counts: tokens by kind, for each document (`TOKEN_COUNTS`).
        repetition: characters in repeated lines, paragraphs and n-grams (`REPETITION`).
        line_counts: lines by kind (`LINE_COUNTS`).
        kept_lines: the text of the lines that stay.
    """

    token_counts: bool = False
    repetition: bool = False
    line_counts: LineShape | None = None
    kept_lines: LineRules | None = None

    def asked(self) -> dict[str, Any]:
        """Return the fields that are asked for."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name))}

    def covers(self, other: Measures) -> bool:
        """Return whether a pass with these measures finds all that `other` asks for."""
        mine = self.asked()
        return all(mine.get(name) == value for name, value in other.asked().items())

    @classmethod
    def of_all(cls, several: Iterable[Measures | None]) -> Measures:
        """Return what several ask for together; where they want one field differently, the first decides."""
        found: dict[str, Any] = {}
        for measures in several:
            if measures is not None:
                found = {**measures.asked(), **found}
        return cls(**found)


@lru_cache(maxsize=1)
def phrases() -> np.ndarray:
    """[8, 3] uint64: of each of `PHRASES` the first and the last eight bytes, and the length."""
    import numpy as np

    raw = [phrase.encode() for phrase in PHRASES]
    return np.array([[int.from_bytes(word[:8], "little"), int.from_bytes(word[-8:], "little"), len(word)]
                     for word in raw], np.uint64)
