"""The filters of a pipeline, `tw.filters`: each is the class of its settings, under the name that recipes use.

    tw.filters.gopher_quality(min_words=60)

Those of installed packages (entry points of the group `tidewheel.filters`) are here too. Checkers and editors know the
built-in ones; import the class of another one from its package, and give that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidewheel.data.filter import FILTERS

if TYPE_CHECKING:  # what an editor sees; a test compares it with what there is
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


if not TYPE_CHECKING:  # to a checker, a name that is not above is a mistake
    def __getattr__(name: str) -> Any:
        """Return the class of a filter, imported when it is first used.

        Raises:
            AttributeError: there is none of this name.
        """
        if name not in FILTERS.names():
            raise AttributeError(f"tidewheel.filters has no filter {name!r}; it has {', '.join(FILTERS.names())}")
        return FILTERS.find(name)


def __dir__() -> list[str]:
    return list(FILTERS.names())
