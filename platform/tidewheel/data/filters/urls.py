"""Filter by URL: drop documents whose URLs are on lists of domains, pages and words.

The rules are those of RefinedWeb (Penedo et al. 2023, arXiv:2306.01116, section G.1) and FineWeb: whole domains,
single pages, words (one is enough), and soft words (several are needed).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import unquote

from pydantic import Field, model_validator

from tidewheel.data import url
from tidewheel.data.filter import Batch, Filter, Limits, Verdicts
from tidewheel.versions import Version

if TYPE_CHECKING:
    import numpy as np

REASONS = ("url_domain", "url_exact", "url_word")
_WORD = re.compile(r"[^\W_]+")


class UrlFilter(Filter):
    """Drop documents whose URL is on a list; keep those without a URL. Files have one entry per line, plain or gzip."""

    VERSION: ClassVar[Version | None] = Version("filter_urls", uses=(url.VERSION,))
    ORDER: ClassVar[int] = 10
    FILES: ClassVar[tuple[str, ...]] = ("domain_files", "url_files", "word_files", "soft_word_files")

    domains: tuple[str, ...] = ()
    """Domains, including their subdomains: example.com also matches www.example.com."""
    domain_files: tuple[str, ...] = ()
    """Files of domains."""
    urls: tuple[str, ...] = ()
    """URLs of single pages, compared in normal form (`url.normalised`)."""
    url_files: tuple[str, ...] = ()
    """Files of pages."""
    words: tuple[str, ...] = ()
    """Words; one in the URL is enough to drop it. A word is a sequence of letters and digits."""
    word_files: tuple[str, ...] = ()
    """Files of such words."""
    soft_words: tuple[str, ...] = ()
    """Soft words; a URL may have `max_soft_words` of them."""
    soft_word_files: tuple[str, ...] = ()
    """Files of such words."""
    max_soft_words: int = Field(default=1, ge=0)
    """Maximum number of soft words in a URL (FineWeb drops documents with two)."""

    @model_validator(mode="after")
    def _some(self) -> UrlFilter:
        if not (self.domains or self.urls or self.words or self.soft_words or self.paths()):
            raise ValueError("give at least one list: domains, urls, words, soft_words, or files of them")
        return self

    def check(self) -> None:
        """Read the lists."""
        _lists(self)

    def limits(self) -> Limits:
        """Return the maximum number of soft words."""
        return {"url_missing": (None, None), "url_soft_words": (None, self.max_soft_words)}

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents by the `url` of their meta.

        Returns:
            One of `REASONS` for each dropped document; statistics: url_missing (1 for a document without a usable URL),
            url_soft_words.

        Raises:
            InputError: a list is missing or is not text.
        """
        import numpy as np

        lists = _lists(self)
        judged = [lists.judge(address) for address in url.of_metas(batch.metas)]
        columns = np.array([(missing, soft) for _, missing, soft in judged], np.float64).reshape(-1, 2)
        return Verdicts([reason for reason, _, _ in judged],
                        {"url_missing": columns[:, 0], "url_soft_words": columns[:, 1]})


@dataclass(frozen=True)
class _Lists:
    """The lists of a filter; domains and URLs are sorted 64-bit hashes, 8 bytes per entry."""

    domains: np.ndarray
    urls: np.ndarray
    words: frozenset[str]
    soft_words: frozenset[str]
    max_soft_words: int

    def judge(self, address: str) -> tuple[str, bool, int]:
        """Return (reason or "", whether the URL is unusable, number of soft words in it)."""
        parsed = url.parse(address)
        if parsed is None:
            return "", True, 0
        words = _WORD.findall(unquote(address).lower())
        soft = sum(word in self.soft_words for word in words)
        if len(self.domains) and _any(self.domains, _above(parsed.host)):
            return "url_domain", False, soft
        if len(self.urls) and _any(self.urls, [url.normalised(address)]):
            return "url_exact", False, soft
        banned = soft > self.max_soft_words or not self.words.isdisjoint(words)
        return "url_word" if banned else "", False, soft


def _above(host: str) -> list[str]:
    """Return a host and every domain above it: a.b.c, b.c, c."""
    labels = host.split(".")
    return [".".join(labels[level:]) for level in range(len(labels))]


def _any(hashes: np.ndarray, values: Iterable[str]) -> bool:
    """Return whether one of `values` is in a list of sorted hashes."""
    requested = _hashed(values)
    rows = hashes.searchsorted(requested).clip(max=len(hashes) - 1)
    return bool((hashes[rows] == requested).any())


def _hashed(values: Iterable[str]) -> np.ndarray:
    import numpy as np
    import xxhash

    return np.array([xxhash.xxh3_64_intdigest(value.encode()) for value in values], np.uint64)


@lru_cache(maxsize=4)
def _lists(config: UrlFilter) -> _Lists:
    """Return the lists of a filter, read once per process."""
    import numpy as np

    from tidewheel.data import resources

    def entries(given: Sequence[str], files: Sequence[str]) -> list[str]:
        return [*given, *resources.lines(files)]

    domains = [_domain(entry) for entry in entries(config.domains, config.domain_files)]
    pages = [form for entry in entries(config.urls, config.url_files) if (form := url.normalised(_absolute(entry)))]
    words, soft = (frozenset(entry.lower() for entry in entries(*given))
                   for given in ((config.words, config.word_files), (config.soft_words, config.soft_word_files)))
    return _Lists(np.unique(_hashed(filter(None, domains))), np.unique(_hashed(pages)), words, soft,
                  config.max_soft_words)


def _absolute(entry: str) -> str:
    return entry if "://" in entry else f"http://{entry}"


def _domain(entry: str) -> str:
    """Return the domain of an entry: lists write example.com, .example.com, *.example.com or a URL."""
    parsed = url.parse(_absolute(entry.removeprefix("*").removeprefix(".")))
    return parsed.host if parsed else ""
