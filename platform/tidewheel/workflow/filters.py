"""The filters a pipeline can use, by name: each call gives what `Pipeline.filter` takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tidewheel.errors import ConfigError


@dataclass(frozen=True)
class Filter:
    """A filter's name and the settings that differ from its defaults."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


def named(given: Any) -> tuple[str, dict[str, Any]]:
    """Return a filter's name and settings: one of this module, or of the user's own.

    Raises:
        ConfigError: it cannot be found by a name.
    """
    from tidewheel.data.filters import own

    if isinstance(given, Filter):
        return given.name, dict(given.settings)
    if isinstance(given, own.Filter):
        return _importable(own.name_of(given)), given.decisive()
    if callable(given) and hasattr(given, "__qualname__") and not isinstance(given, type):
        return _importable(f"{given.__module__}:{given.__qualname__}"), {}
    raise ConfigError(f"{given!r} is no filter", where="Pipeline.filter",
                      mend="give one of tw.filters, a tw.Filter with its settings, or a function of one document")


def _importable(name: str) -> str:
    if name.startswith("__main__:") or "<" in name or "." in name.partition(":")[2]:
        raise ConfigError(f"workers cannot import {name}", where="Pipeline.filter",
                          mend="define the filter at the top of a module of its own, and import it from there")
    return name


def urls(**settings: Any) -> Filter:
    """Lists of domains, pages and words in URLs; `tidewheel.data.filters.urls.UrlFilter` lists the keywords."""
    return Filter("urls", settings)


def language(*allow: str, **settings: Any) -> Filter:
    """Keep documents in the languages `allow` (English), as a fastText model sees them;
    `tidewheel.data.filters.language.Language` lists the keywords."""
    return Filter("language", {"allow": list(allow), **settings} if allow else settings)


def words(*files: str, **settings: Any) -> Filter:
    """Drop documents with words from lists; `tidewheel.data.filters.words.WordFilter` lists the keywords."""
    return Filter("words", {"files": list(files), **settings} if files else settings)


def classifier(file: str, **settings: Any) -> Filter:
    """Keep what a classifier in fastText's format takes for good; `tidewheel.data.filters.classifier.Classifier` lists
    the keywords, `tidewheel data train-classifier` makes one."""
    return Filter("classifier", {"file": file, **settings})


def gopher_repetition(**settings: Any) -> Filter:
    """Duplicate lines and paragraphs, frequent and repeated n-grams, with the thresholds of Rae et al. 2021 (table A1).
    Keywords override single thresholds; `tidewheel.data.filters.repetition.GopherRepetition` lists them."""
    return Filter("gopher_repetition", settings)


def gopher_quality(**settings: Any) -> Filter:
    """Word counts, word lengths, symbols, bullets, ellipses and stop words, with the thresholds of Rae et al. 2021
    (table A1). Keywords override single thresholds; `tidewheel.data.filters.quality.GopherQuality` lists them."""
    return Filter("gopher_quality", settings)


def c4(**settings: Any) -> Filter:
    """C4's rules: lines that end no sentence, are too short or mention JavaScript or cookies are removed; documents
    with "lorem ipsum", a curly bracket or too few sentences are dropped. FineWeb has it with
    `terminal_punctuation=False`. Keywords are those of `tidewheel.data.filters.c4.C4`."""
    return Filter("c4", settings)


def fineweb(**settings: Any) -> Filter:
    """Ends of lines, short and repeated lines, and lists, with the thresholds of FineWeb.
    Keywords override single thresholds; `tidewheel.data.filters.fineweb.FineWeb` lists them."""
    return Filter("fineweb", settings)


def refinedweb(**settings: Any) -> Filter:
    """RefinedWeb's line rules as DCLM has them: lines mostly in upper case, of digits, of one word, counters and menu
    phrases are removed, and documents that lose too much are dropped.
    Keywords override single thresholds; `tidewheel.data.filters.refinedweb.RefinedWeb` lists them."""
    return Filter("refinedweb", settings)


def pii(**settings: Any) -> Filter:
    """E-mail and public IPv4 addresses are replaced by placeholders, chosen by the hash of what they replace.
    Keywords are those of `tidewheel.data.filters.pii.Pii`."""
    return Filter("pii", settings)
