"""Lists of unwanted words, as C4 uses one (Raffel et al. 2020, section 2.2; the lists of LDNOOBW have its format)."""

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
_FACTOR = 0x9E3779B97F4A7C15  # odd: sequences of word hashes become one number by a polynomial modulo 2**64


class WordFilter(Filter):
    """Documents with too many words from a list go. An entry may be several words, which must follow each other."""

    VERSION: ClassVar[Version | None] = Version("filter_words", uses=(text.VERSION,))
    ORDER: ClassVar[int] = 80
    FILES: ClassVar[tuple[str, ...]] = ("files",)

    words: tuple[str, ...] = ()
    """Entries of the list. Case, accents and punctuation do not count; only whole words do."""
    files: tuple[str, ...] = ()
    """Files with one entry a line, plain or gzip."""
    max_count: int | None = Field(default=0, ge=0)
    """Most occurrences in a document that stays; C4 allows none. null = any number."""
    max_share: float | None = Field(default=None, ge=0, le=1)
    """Largest number of occurrences for each word of the document. null = any."""

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
        """Return the largest count and share."""
        return {"listed_words": (None, self.max_count), "listed_word_share": (None, self.max_share)}

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents. Words are those of the normalised text (`text`), compared by their hashes in whole arrays.

        Returns:
            `REASON` for each document that goes; statistics: listed_words (occurrences of entries), listed_word_share
            (the same for each word).

        Raises:
            InputError: a list is missing or is no text.
        """
        import numpy as np

        found, total = count(batch.texts, _entries(self.words, self.files))
        share = found / np.maximum(total, 1)
        gone = np.zeros(len(found), bool)
        if self.max_count is not None:
            gone |= found > self.max_count
        if self.max_share is not None:
            gone |= share > self.max_share
        return Verdicts([REASON if each else "" for each in gone.tolist()],
                        {"listed_words": found.astype(np.float64), "listed_word_share": np.minimum(share, 1.0)})


def count(texts: Texts, entries: dict[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(occurrences of entries, words) of each document, int64 [n]; `entries` as `hashed` gives them."""
    import numpy as np

    found = np.zeros(len(texts), np.int64)
    total = np.zeros(len(texts), np.int64)
    for first, last, words in text.scan(texts, keep_digits=True):
        total[first:last] = np.diff(words.offsets)
        for length, listed in entries.items():
            starts = _occurrences(words.hashes, length, listed)
            documents = np.searchsorted(words.offsets, starts, "right") - 1
            inside = starts + length <= words.offsets[documents + 1]
            found[first:last] += np.bincount(documents[inside], minlength=last - first)
    return found, total


def _occurrences(hashes: np.ndarray, length: int, listed: np.ndarray) -> np.ndarray:
    """Places where a sequence of so many words is in the list, int64, ascending."""
    import numpy as np

    sequences = _sequences(hashes, length)
    places = np.minimum(np.searchsorted(listed, sequences), len(listed) - 1)
    return np.flatnonzero(listed[places] == sequences)


def _sequences(hashes: np.ndarray, length: int) -> np.ndarray:
    """One number for each sequence of `length` hashes: uint64 [w - length + 1]."""
    import numpy as np

    size = max(len(hashes) - length + 1, 0)
    total = np.zeros(size, np.uint64)
    for place in range(length):
        total = total * np.uint64(_FACTOR) + hashes[place : place + size]
    return total


def hashed(entries: Sequence[str]) -> dict[int, np.ndarray]:
    """The entries by their number of words: sorted sequence hashes, uint64. Entries without a word count for none."""
    import numpy as np

    words = text.words(list(entries), keep_digits=True)
    found: dict[int, list[int]] = {}
    for first, last in zip(words.offsets[:-1].tolist(), words.offsets[1:].tolist(), strict=True):
        if last > first:
            value = int(_sequences(words.hashes[first:last], last - first)[0])
            found.setdefault(last - first, []).append(value)
    return {length: np.unique(np.array(values, np.uint64)) for length, values in sorted(found.items())}


@lru_cache(maxsize=4)
def _entries(words: tuple[str, ...], files: tuple[str, ...]) -> dict[int, np.ndarray]:
    from tidewheel.data import resources

    return hashed([*words, *resources.lines(files)])
