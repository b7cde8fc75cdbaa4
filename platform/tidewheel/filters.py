"""The filters of a pipeline, `tw.filters`: one settings class per filter, under the name that recipes use.

    tw.filters.gopher_quality(min_words=60)

The filters of installed packages (entry points of the group `tidewheel.filters`) are here too. Type checkers and
editors know only the built-in filters; for another one, import its class from its package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidewheel.data.filter import FILTERS

if TYPE_CHECKING:  # for editors; a test compares this list with the built-in filters
    from tidewheel.data.filters.c4 import C4 as c4
    from tidewheel.data.filters.classifier import Classifier as classifier
    from tidewheel.data.filters.fineweb import FineWeb as fineweb
    from tidewheel.data.filters.gopher_quality import GopherQuality as gopher_quality
    from tidewheel.data.filters.gopher_repetition import GopherRepetition as gopher_repetition
    from tidewheel.data.filters.language import Language as language
    from tidewheel.data.filters.pii import Pii as pii
    from tidewheel.data.filters.refinedweb import RefinedWeb as refinedweb
    from tidewheel.data.filters.urls import UrlFilter as urls
    from tidewheel.data.filters.words import WordFilter as words

__all__ = ["c4", "classifier", "fineweb", "gopher_quality", "gopher_repetition", "language", "pii", "refinedweb",
           "urls", "words"]


if not TYPE_CHECKING:  # a type checker reports any name that is not imported above
    def __getattr__(name: str) -> Any:
        """Return the class of a filter; import it on first use.

        Raises:
            AttributeError: no filter has this name.
        """
        if name not in FILTERS.names():
            raise AttributeError(f"tidewheel.filters has no filter {name!r}; it has {', '.join(FILTERS.names())}")
        return FILTERS.find(name)


def __dir__() -> list[str]:
    return list(FILTERS.names())
