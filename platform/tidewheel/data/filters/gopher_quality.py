"""Gopher quality rules (Rae et al. 2021, section A1.1; thresholds as in FineWeb / datatrove).

The tokens are close to those of spaCy for English, which datatrove uses by default. Dropped characters (diacritics,
format characters) are ignored. White space separates the text into chunks, and each chunk is split into tokens:

- Marks at its start and end are removed one by one, and each becomes a token: punctuation, quotes, brackets, pictures,
  currencies (at the end after a digit), runs of full stops, "%" and dashes, "'s", units after a digit ("10km"), a full
  stop after a lower-case letter, digit or mark, or after two capitals.
- This stops at a word that has its own splits, or none: "can|not", "do|n't", "e.g.", "Mr.", ":-)"
  (`token_table.special_words`).
- Unless it is a URL or an e-mail address, the rest is split at runs of full stops and pictures; "." between a
  lower-case and an upper-case letter; "," between letters; hyphens and dashes between letters or after a digit; ":",
  "<", ">", "=" and "/" likewise; "+", "-", "*" and "^" between digits.
- Adjacent marks that form an emoticon become one token.

The classes of characters are in `token_table`. Texts without spaces between words (Chinese, Thai) are split only at
punctuation, as in spaCy for English. A token that is only punctuation is a symbol and not a word.

One compiled pass (`textpass`) counts tokens in the raw text, not in the normalised one.
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
    """Gopher's quality rules on the number and length of words, symbols, bullets, ellipses and stop words.

    A value equal to a threshold is kept.
    """

    VERSION: ClassVar[Version | None] = Version("filter_gopher_quality", uses=(MEASURES,))
    ORDER: ClassVar[int] = 40

    min_words: int = 50
    """Minimum number of words (tokens that are not symbols)."""
    max_words: int = 100_000
    """Maximum number of words."""
    min_mean_word_length: float = 3.0
    """Minimum mean length of a word, in characters."""
    max_mean_word_length: float = 10.0
    """Maximum mean length of a word, in characters."""
    max_hash_ratio: float = 0.1
    """Maximum number of "#" characters per token."""
    max_ellipsis_ratio: float = 0.1
    """Maximum number of "..." and U+2026 per token."""
    max_bullet_lines: float = 0.9
    """Maximum share of lines that start with "-" or U+2022."""
    max_ellipsis_lines: float = 0.3
    """Maximum share of lines that end in "..." or U+2026."""
    min_alphabetic_words: float = 0.8
    """Minimum share of tokens that contain a letter."""
    min_stop_words: int = 2
    """Minimum number of distinct words of {the, be, to, of, and, that, have, with}, in lower case."""

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
        """Request counts of tokens."""
        return Measures(token_counts=True)

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents.

        Returns:
            One of `REASONS` for each dropped document; statistics: the keys of `limits`. Ratios of a document without
            tokens or lines are 0.
        """
        counts = batch.measure(self.measures()).token_counts
        assert counts is not None
        statistics = _statistics(counts)
        return Verdicts(first_failing(statistics, self.limits(), _RULES), statistics)


# in the order in which the rules are applied
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
    column = {name: counts[:, index].astype(np.float64) for index, name in enumerate(TOKEN_COUNTS)}
    tokens = np.maximum(column["tokens"], 1)
    lines = np.maximum(column["lines"], 1)
    words = column["tokens"] - column["symbol_tokens"]
    return {
        "words": words,
        "mean_word_length": column["word_characters"] / np.maximum(words, 1),
        "hash_ratio": column["hashes"] / tokens,
        "ellipsis_ratio": column["ellipses"] / tokens,
        "bullet_lines": column["bullet_lines"] / lines,
        "ellipsis_lines": column["ellipsis_lines"] / lines,
        "alphabetic_words": column["alphabetic_words"] / tokens,
        "stop_words": column["stop_words"],
    }
