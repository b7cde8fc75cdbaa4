"""`Filter`, the base of all filters: a part that judges, and may edit, one document at a time.

    class Shouting(tw.Filter):
        "Drop documents in capitals."
        max_upper: float = 0.3

        def limits(self):
            return {"upper_letters": (None, self.max_upper)}

        def apply(self, batch):
            upper = ...  # float64 [n]
            return tw.Verdicts(["shouting" if value > self.max_upper else "" for value in upper],
                               {"upper_letters": upper})

    def short(document):  # id, text, source, meta
        return len(document["text"]) > 200  # or the reason to drop it

The built-in ones are the modules of `tidewheel.data.filters`.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict

from tidewheel.errors import InputError, TidewheelError
from tidewheel.parts import Kind, Part, is_own, name_of
from tidewheel.versions import Version

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from tidewheel.data.text.measures import Measures
    from tidewheel.data.textpass import Measured

Limits = Mapping[str, tuple[float | None, float | None]]
"""(smallest, largest) value that is kept, by statistic."""
OWN = Version("own_filters")
"""Version of how filters from outside the package are applied. Keys of units also contain the filter's source."""


class Document(TypedDict):
    """A document, as yielded by `Batch.documents` and passed to a function of one document."""

    id: str
    """Stable id."""
    text: str
    """Text, as edited by the filters before this one."""
    source: str
    """Origin of the document."""
    meta: dict[str, Any]
    """Other fields of its record, JSON values."""


@dataclass(frozen=True)
class Batch:
    """n documents.

    Args:
        table: string columns `id`, `source` and `meta` (JSON objects), and large_string column `text`.
        measured: measures of the texts that several filters share; None if they have not been made.
    """

    table: pa.Table
    measured: Measured | None = None

    @classmethod
    def of(cls, texts: Sequence[str] | pa.Array | pa.ChunkedArray) -> Self:
        """Return a batch of texts, to try a filter: ids are numbers, sources and metas are empty."""
        import pyarrow as pa

        column = texts if isinstance(texts, pa.Array | pa.ChunkedArray) else pa.array(texts, pa.large_string())
        count = len(column)
        ids = pa.array([str(index) for index in range(count)], pa.string())
        return cls(pa.table({"id": ids, "text": column.cast(pa.large_string()),
                             "source": pa.array([""] * count, pa.string()),
                             "meta": pa.array(["{}"] * count, pa.string())}))

    @property
    def texts(self) -> pa.LargeStringArray:
        """Texts as edited by the filters before this one, large_string [n]."""
        return self._column("text")

    @property
    def ids(self) -> pa.StringArray:
        """Ids, string [n]."""
        return self._column("id")

    @property
    def sources(self) -> pa.StringArray:
        """Sources, string [n]."""
        return self._column("source")

    @property
    def metas(self) -> pa.StringArray:
        """Other fields of the records, JSON objects, string [n]."""
        return self._column("meta")

    def documents(self) -> Iterator[Document]:
        """Yield the documents one by one as mappings with id, text, source and meta (a dict)."""
        for row in zip(self.ids, self.texts, self.sources, self.metas, strict=True):
            name, text, source, meta = (value.as_py() for value in row)
            yield {"id": name, "text": text, "source": source, "meta": json.loads(meta)}

    def measure(self, asked: Measures) -> Measured:
        """Return measures of the texts: those that filters share, or new ones.

        Args:
            asked: the result of `Filter.measures` of the same filter.
        """
        from tidewheel.data import textpass

        return textpass.measure(self.texts, asked) if self.measured is None else self.measured

    def __len__(self) -> int:
        return len(self.table)

    def _column(self, name: str) -> Any:
        column = self.table[name]
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


@dataclass(frozen=True)
class Verdicts:
    """Verdicts of a filter on n documents.

    Args:
        reasons: n strings: "" to keep the document, else the reason to drop it.
        statistics: float64 [n] by name, for histograms and `annotate`. Names are unique in a step.
        texts: n edited texts, from a filter that edits.
        metas: n JSON objects that replace meta, from a filter that `WRITES`; None keeps the old ones.
        quality: float32 [n], from a filter that `WRITES`. Of duplicates, the document with the highest quality stays.
    """

    reasons: Sequence[str]
    statistics: Mapping[str, np.ndarray] = field(default_factory=dict)
    texts: pa.Array | Sequence[str] | None = None
    metas: pa.Array | Sequence[str] | None = None
    quality: np.ndarray | None = None


class Filter(Part):
    """Base of a filter: its fields are its settings."""

    EDITS: ClassVar[str] = ""
    """Reason in the verdict on a document whose text it changes; "" for a filter that only drops."""
    DETAILS: ClassVar[tuple[str, ...]] = ()
    """Statistics that this verdict includes."""
    WRITES: ClassVar[bool] = False
    """Whether it returns metas or quality."""
    ORDER: ClassVar[int] = 1000
    """Filters of a step apply in this order; filters with the same number apply in the order of their names."""
    FILES: ClassVar[tuple[str, ...]] = ()
    """Settings that contain the path of a file, or a tuple of paths; relative ones are below the pipeline's input. On
    workers they contain references for `resources.read` and `resources.lines` instead."""
    KERNELS: ClassVar[tuple[str, ...]] = ()
    """Modules with compiled passes of its own."""

    def limits(self) -> Limits:
        """Return (smallest, largest) kept value by statistic; the report draws them into its histograms."""
        return {}

    def measures(self) -> Measures | None:
        """Return the measures that it needs from the pass over the texts that filters share; see `Batch.measure`."""
        return None

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents. A verdict must depend on the document alone, not on the others in the batch."""
        raise NotImplementedError

    def check(self) -> None:
        """Check the files in the settings.

        Raises:
            InputError: a file is missing or invalid, so that `apply` would fail.
        """

    def packages(self) -> dict[str, str]:
        """Return the versions of packages that decide the verdicts, for unit keys."""
        return {}

    @classmethod
    def changes(cls) -> bool:
        """Return whether it may change documents."""
        return bool(cls.EDITS) or cls.WRITES

    def paths(self) -> tuple[str, ...]:
        """Return every path in the settings."""
        paths: list[str] = []
        for name in self.FILES:
            value = getattr(self, name)
            paths += [value] if isinstance(value, str) else value
        return tuple(paths)

    def with_files(self, change: Callable[[str], str]) -> Self:
        """Return the filter with every path replaced by `change(path)`."""
        values: dict[str, Any] = {}
        for name in self.FILES:
            value = getattr(self, name)
            values[name] = change(value) if isinstance(value, str) else tuple(change(path) for path in value)
        return self.model_copy(update=values)


class FunctionFilter(Filter):
    """Filter that calls a function for each document: True keeps it, False drops it, a string is the reason to drop."""

    function: ClassVar[Callable[[Document], bool | str]]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> type[Filter]:
        """Return the filter class that calls a function."""
        return type(cls.__name__, (cls,), {"function": staticmethod(function), "__module__": __name__})

    def apply(self, batch: Batch) -> Verdicts:
        """Call the function for each document."""
        return Verdicts([self._reason(document) for document in batch.documents()])

    def _reason(self, document: Document) -> str:
        function = type(self).function
        answer = function(document)
        if isinstance(answer, str):
            return answer
        if isinstance(answer, bool):
            return "" if answer else function.__name__
        raise TypeError(f"returned {type(answer).__name__} for document {document['id']}, which is not True, False or "
                        "the reason to drop it")


FILTERS = Kind("filter", Filter, "tidewheel.data.filters", "tidewheel.filters", FunctionFilter.of)


def judged(filter: Filter, batch: Batch) -> Verdicts:
    """Apply a filter and check that its verdicts match the documents.

    In the returned verdicts statistics are float64 [n], texts and metas are arrays.

    Raises:
        InputError: a filter from outside the package raised an error, or its verdicts do not match.
        TidewheelError: raised by the filter itself.
    """
    name = name_of(type(filter))
    try:
        return _fitting(filter, filter.apply(batch), len(batch))
    except TidewheelError:
        raise
    except Exception as error:
        if not is_own(name):
            raise
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
        raise InputError(f"the filter {name} failed: {type(error).__name__}: {error}", where=where,
                         fix="correct the filter and run again; what is finished stays") from error


def _fitting(filter: Filter, verdicts: Any, count: int) -> Verdicts:
    import numpy as np
    import pyarrow as pa

    if not isinstance(verdicts, Verdicts):
        raise TypeError(f"apply returned {type(verdicts).__name__}, which is not tw.Verdicts")
    if filter.EDITS and verdicts.texts is None:
        raise TypeError("it has EDITS, so apply must return texts")
    if verdicts.texts is not None and not filter.EDITS:
        raise TypeError("it returns texts, so the class must set EDITS, the reason in verdicts on documents it changes")
    if (verdicts.metas is not None or verdicts.quality is not None) and not filter.WRITES:
        raise TypeError("it returns metas or quality, so the class must set WRITES = True")
    statistics = {key: np.asarray(values, np.float64) for key, values in verdicts.statistics.items()}
    sizes = {"reasons": len(verdicts.reasons), **{key: len(values) for key, values in statistics.items()}}
    for key in ("texts", "metas", "quality"):
        if getattr(verdicts, key) is not None:
            sizes[key] = len(getattr(verdicts, key))
    for key, size in sizes.items():
        if size != count:
            raise ValueError(f"{key} are {size}, for {count} documents")
    texts = verdicts.texts
    metas = verdicts.metas
    return Verdicts([str(reason) for reason in verdicts.reasons], statistics,
                    texts if texts is None or isinstance(texts, pa.Array) else pa.array(texts, pa.large_string()),
                    metas if metas is None or isinstance(metas, pa.Array) else pa.array(metas, pa.string()),
                    verdicts.quality)
