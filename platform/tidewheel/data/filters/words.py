"""A filter by lists of unwanted words, like C4's (Raffel et al. 2020, section 2.2; the format of LDNOOBW's lists)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from tidewheel.data import text
from tidewheel.data.filter import Batch, Filter, Limits, Verdicts
from tidewheel.versions import Version

if TYPE_CHECKING:
    import numpy as np

    from tidewheel.data.text import Texts

REASON = "listed_words"
_FACTOR = 0x9E3779B97F4A7C15  # odd; a polynomial modulo 2**64 maps a sequence of word hashes to one number


class WordFilter(Filter):
    """Drop documents with too many words from a list. An entry may be a sequence of several words."""

    VERSION: ClassVar[Version | None] = Version("filter_words", uses=(text.VERSION,))
    ORDER: ClassVar[int] = 80
    FILES: ClassVar[tuple[str, ...]] = ("files",)

    words: tuple[str, ...] = ()
    """Entries of the list. They match whole words; case, accents and punctuation are ignored."""
    files: tuple[str, ...] = ()
    """Files with one entry per line, plain or gzip."""
    max_count: int | None = Field(default=0, ge=0)
    """Maximum number of occurrences in a document; C4 allows none. null = no limit."""
    max_share: float | None = Field(default=None, ge=0, le=1)
    """Maximum number of occurrences per word of the document. null = no limit."""

    @model_validator(mode="after")
    def _some(self) -> WordFilter:
        if not (self.words or self.files):
            raise ValueError("give words or files of them")
        if self.max_count is None and self.max_share is None:
            raise ValueError("give max_count or max_share")
        return self

    def check(self) -> None:
        """Read the list."""
        _entries(self.words, self.files)

    def limits(self) -> Limits:
        """Return the maximum count and share."""
        return {"listed_words": (None, self.max_count), "listed_word_share": (None, self.max_share)}

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents. Words are those of the normalised text (`text`), compared by their hashes.

        Returns:
            `REASON` for each dropped document; statistics: listed_words (number of occurrences of entries),
            listed_word_share (the same per word of the document).

        Raises:
            InputError: a list is missing or is not text.
        """
        import numpy as np

        occurrences, total = count(batch.texts, _entries(self.words, self.files))
        share = occurrences / np.maximum(total, 1)
        is_dropped = np.zeros(len(occurrences), bool)
        if self.max_count is not None:
            is_dropped |= occurrences > self.max_count
        if self.max_share is not None:
            is_dropped |= share > self.max_share
        return Verdicts([REASON if dropped else "" for dropped in is_dropped.tolist()],
                        {"listed_words": occurrences.astype(np.float64), "listed_word_share": np.minimum(share, 1.0)})


def count(texts: Texts, entries: dict[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of (occurrences of entries, words) of each document, both int64 [texts].

    Args:
        texts: the documents' texts.
        entries: what `hashed` returns.
    """
    import numpy as np

    occurrences = np.zeros(len(texts), np.int64)
    total = np.zeros(len(texts), np.int64)
    for first, last, words in text.scan(texts, keep_digits=True):
        total[first:last] = np.diff(words.offsets)
        for length, listed in entries.items():
            starts = _occurrences(words.hashes, length, listed)
            documents = np.searchsorted(words.offsets, starts, "right") - 1
            inside = starts + length <= words.offsets[documents + 1]
            occurrences[first:last] += np.bincount(documents[inside], minlength=last - first)
    return occurrences, total


def _occurrences(hashes: np.ndarray, length: int, listed: np.ndarray) -> np.ndarray:
    """Return the indices at which a listed sequence of `length` words begins, int64, ascending."""
    import numpy as np

    sequences = _sequences(hashes, length)
    rows = np.minimum(np.searchsorted(listed, sequences), len(listed) - 1)
    return np.flatnonzero(listed[rows] == sequences)


def _sequences(hashes: np.ndarray, length: int) -> np.ndarray:
    """Return one number for each sequence of `length` hashes: uint64 [len(hashes) - length + 1]."""
    import numpy as np

    size = max(len(hashes) - length + 1, 0)
    total = np.zeros(size, np.uint64)
    for shift in range(length):
        total = total * np.uint64(_FACTOR) + hashes[shift : shift + size]
    return total


def hashed(entries: Sequence[str]) -> dict[int, np.ndarray]:
    """Return the sorted sequence hashes (uint64) of entries, by their number of words. Skip entries without words."""
    import numpy as np

    words = text.words(list(entries), keep_digits=True)
    hashes: dict[int, list[int]] = {}
    for first, last in zip(words.offsets[:-1].tolist(), words.offsets[1:].tolist(), strict=True):
        if last > first:
            value = int(_sequences(words.hashes[first:last], last - first)[0])
            hashes.setdefault(last - first, []).append(value)
    return {length: np.unique(np.array(values, np.uint64)) for length, values in sorted(hashes.items())}


@lru_cache(maxsize=4)
def _entries(words: tuple[str, ...], files: tuple[str, ...]) -> dict[int, np.ndarray]:
    from tidewheel.data import resources

    return hashed([*words, *resources.lines(files)])
