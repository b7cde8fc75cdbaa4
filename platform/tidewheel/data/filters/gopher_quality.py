"""Gopher quality rules (Rae et al. 2021, section A1.1; thresholds as in FineWeb / datatrove).

Words are tokens of this rule, close to spaCy's for English, which datatrove takes by default; dropped
characters (diacritics, format characters) are as if they were not there. White space cuts the text into chunks, and a
chunk into tokens:

- at its start and end, marks are taken off one after the other, each a token: punctuation, quotes, brackets, pictures,
  currencies (at the end behind a digit), runs of full stops, "%" and dashes, "'s", units behind a digit ("10km"), a
  full stop behind a lower-case letter, digit or mark, or behind two capitals;
- not further than a word with cuts of its own, or without any: "can|not", "do|n't", "e.g.", "Mr.", ":-)"
  (`token_table.special_words`);
- what is left is cut at runs of full stops and pictures; "." between a lower-case and an upper-case letter; "," between
  letters; hyphens and dashes between letters or behind a digit; ":", "<", ">", "=" and "/" likewise; "+", "-", "*" and
  "^" between digits; unless it is a URL or an e-mail address;
- marks side by side that are an emoticon together become one token.

The classes of characters are in `token_table`. Texts without spaces between words (Chinese, Thai) are cut at
punctuation only, as by spaCy for English. A token of punctuation alone is a symbol and no word.

Counts come from one compiled pass (`textpass`) over the raw text, not over the normalised one.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tidewheel.data.filter import Batch, Filter, Limits, Verdicts
from tidewheel.data.text.measures import TOKEN_COUNTS, Measures
from tidewheel.data.text.measures import VERSION as MEASURES
from tidewheel.data.thresholds import LEAST, MOST, Rule, first_failing
from tidewheel.versions import Version


class GopherQuality(Filter):
    """The quality rules of Gopher: counts of words, their lengths, symbols, bullets, ellipses and stop words. A value
    equal to a threshold is kept."""

    VERSION: ClassVar[Version | None] = Version("filter_gopher_quality", uses=(MEASURES,))
    ORDER: ClassVar[int] = 40

    min_words: int = 50
    """Fewest words (tokens that are not symbols)."""
    max_words: int = 100_000
    """Most words."""
    min_mean_word_length: float = 3.0
    """Smallest mean length of a word, in characters."""
    max_mean_word_length: float = 10.0
    """Largest mean length of a word."""
    max_hash_ratio: float = 0.1
    """Most "#" characters per token."""
    max_ellipsis_ratio: float = 0.1
    """Most "..." and U+2026 per token."""
    max_bullet_lines: float = 0.9
    """Largest share of lines that start with "-" or U+2022."""
    max_ellipsis_lines: float = 0.3
    """Largest share of lines that end in "..." or U+2026."""
    min_alphabetic_words: float = 0.8
    """Smallest share of tokens with a letter in them."""
    min_stop_words: int = 2
    """Fewest distinct words of {the, be, to, of, and, that, have, with}, in lower case."""

    def limits(self) -> Limits:
        """Return the thresholds by statistic."""
        return {
            "words": (self.min_words, self.max_words),
            "mean_word_length": (self.min_mean_word_length, self.max_mean_word_length),
            "hash_ratio": (None, self.max_hash_ratio),
            "ellipsis_ratio": (None, self.max_ellipsis_ratio),
            "bullet_lines": (None, self.max_bullet_lines),
            "ellipsis_lines": (None, self.max_ellipsis_lines),
            "alphabetic_words": (self.min_alphabetic_words, None),
            "stop_words": (self.min_stop_words, None),
        }

    def measures(self) -> Measures:
        """Ask for counts of tokens."""
        return Measures(token_counts=True)

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents.

        Returns:
            One of `REASONS` for each document that goes; statistics: the keys of `limits`. Ratios of a document
            without tokens or lines are 0.
        """
        counts = batch.measure(self.measures()).token_counts
        assert counts is not None
        statistics = _statistics(counts)
        return Verdicts(first_failing(statistics, self.limits(), _RULES), statistics)


# in the order in which rules are tried
_RULES: tuple[Rule, ...] = (
    ("words", LEAST, "gopher_too_few_words"),
    ("words", MOST, "gopher_too_many_words"),
    ("mean_word_length", LEAST, "gopher_words_too_short"),
    ("mean_word_length", MOST, "gopher_words_too_long"),
    ("hash_ratio", MOST, "gopher_too_many_hashes"),
    ("ellipsis_ratio", MOST, "gopher_too_many_ellipses"),
    ("bullet_lines", MOST, "gopher_too_many_bullet_lines"),
    ("ellipsis_lines", MOST, "gopher_too_many_ellipsis_lines"),
    ("alphabetic_words", LEAST, "gopher_too_few_alphabetic_words"),
    ("stop_words", LEAST, "gopher_too_few_stop_words"),
)
REASONS = tuple(reason for _, _, reason in _RULES)


def _statistics(counts: np.ndarray) -> dict[str, np.ndarray]:
    column = {name: counts[:, place].astype(np.float64) for place, name in enumerate(TOKEN_COUNTS)}
    tokens, lines = np.maximum(column["tokens"], 1), np.maximum(column["lines"], 1)
    plain = column["tokens"] - column["symbol_tokens"]
    return {
        "words": plain,
        "mean_word_length": column["word_characters"] / np.maximum(plain, 1),
        "hash_ratio": column["hashes"] / tokens,
        "ellipsis_ratio": column["ellipses"] / tokens,
        "bullet_lines": column["bullet_lines"] / lines,
        "ellipsis_lines": column["ellipsis_lines"] / lines,
        "alphabetic_words": column["alphabetic_words"] / tokens,
        "stop_words": column["stop_words"],
    }
