"""Filters of the user's own: a class or a plain function in a module outside this package, named `module:name`.

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

A module is found from the working folder, as `python -m` finds it; `--working-dir` takes it along to a cluster. Its
source is part of the keys of what the filter makes: when the source changes, units are made again.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from tidewheel.config import Config
from tidewheel.errors import ConfigError, InputError
from tidewheel.storage import content_hash

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_names: dict[type[Filter], str] = {}
CODE = "code"
"""Key of the JSON form under which workers are told where a filter's source is, and what it must be."""
Limits = dict[str, tuple[float | None, float | None]]


@dataclass(frozen=True)
class Batch:
    """n documents: `ids`, `sources`, `metas` (JSON objects) are string arrays, `texts` large_string."""

    table: pa.Table

    @property
    def texts(self) -> pa.LargeStringArray:
        """Texts as the filters before this one left them, large_string [n]."""
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
        """Further fields of the records, JSON objects, string [n]."""
        return self._column("meta")

    def documents(self) -> Iterator[dict[str, Any]]:
        """Yield the documents one by one as mappings with id, text, source and meta (a dict)."""
        for row in zip(self.ids, self.texts, self.sources, self.metas, strict=True):
            name, text, source, meta = (value.as_py() for value in row)
            yield {"id": name, "text": text, "source": source, "meta": json.loads(meta)}

    def __len__(self) -> int:
        return len(self.table)

    def _column(self, name: str) -> Any:
        import pyarrow as pa

        column = self.table[name]
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


@dataclass(frozen=True)
class Verdicts:
    """What a filter makes of n documents.

    Args:
        reasons: n strings, "" to keep the document, else the reason to drop it.
        statistics: float64 [n] by name, for histograms and `annotate`. Names are unique in a step.
        texts: n texts as they are to be, of a filter that edits.
    """

    reasons: Sequence[str]
    statistics: Mapping[str, np.ndarray] = field(default_factory=dict)
    texts: pa.Array | Sequence[str] | None = None


class Filter(Config):
    """Base of a filter: its fields are its settings."""

    edits: ClassVar[str] = ""
    """Reason in the verdict of a document whose text it changes; "" for a filter that only drops."""

    def limits(self) -> Limits:
        """Return (smallest, largest) kept value by statistic; the report draws them into its histograms."""
        return {}

    def apply(self, batch: Batch) -> Verdicts:
        """Judge documents. The same document must always get the same verdict, whatever is beside it in the batch."""
        raise NotImplementedError


class FunctionFilter(Filter):
    """A plain function of one document: True keeps it, False drops it, a string is the reason to drop it."""

    function: ClassVar[Callable[[Mapping[str, Any]], bool | str]]

    def apply(self, batch: Batch) -> Verdicts:
        """Call the function for each document."""
        return Verdicts([self._reason(document) for document in batch.documents()])

    def _reason(self, document: Mapping[str, Any]) -> str:
        function = type(self).function
        answer = function(document)
        if isinstance(answer, str):
            return answer
        if isinstance(answer, bool):
            return "" if answer else function.__name__
        raise TypeError(f"returned {type(answer).__name__} for document {document['id']}, which is not True, False or "
                        "the reason to drop it")


def judged(name: str, settings: Filter, table: pa.Table) -> tuple[Any, ...]:
    """Apply a filter: (reasons, statistics), and the texts of one that edits.

    Raises:
        InputError: the filter raised an error, or its answer does not fit the documents.
    """
    import numpy as np

    batch = Batch(table)
    try:
        verdicts = settings.apply(batch)
        if not isinstance(verdicts, Verdicts):
            raise TypeError(f"apply returned {type(verdicts).__name__}, which is not tw.Verdicts")
        reasons = [str(reason) for reason in verdicts.reasons]
        statistics = {key: np.asarray(values, np.float64) for key, values in verdicts.statistics.items()}
        texts = verdicts.texts if settings.edits else None
        if settings.edits and texts is None:
            raise TypeError("it has `edits`, so apply must return texts")
        sizes = {"reasons": len(reasons), **{key: len(values) for key, values in statistics.items()}}
        for key, size in (sizes if texts is None else {**sizes, "texts": len(texts)}).items():
            if size != len(batch):
                raise ValueError(f"{key} are {size}, for {len(batch)} documents")
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
        raise InputError(f"the filter {name} failed: {type(error).__name__}: {error}", where=where,
                         mend="correct the filter and run again; what is finished stays") from error
    if texts is None:
        return reasons, statistics
    import pyarrow as pa

    return reasons, statistics, texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string())


def is_own(name: str) -> bool:
    """Return whether a filter's name is `module:name`."""
    return ":" in name


def name_of(settings: Filter) -> str:
    """Return the name `module:name` by which a filter was found, or can be."""
    kind = type(settings)
    return _names.get(kind) or f"{kind.__module__}:{kind.__qualname__}"


def find(name: str) -> type[Filter]:
    """Return the class of the filter `module:name`.

    Raises:
        ConfigError: there is no such module or name in it, or it is no filter.
    """
    return _find(name, os.getcwd())


@lru_cache(maxsize=64)
def _find(name: str, folder: str) -> type[Filter]:
    module_name, _, part = name.partition(":")
    module = _module(module_name, name, folder)
    value = getattr(module, part, None)
    if isinstance(value, type) and issubclass(value, Filter):
        _names[value] = name
        return value
    if callable(value) and not isinstance(value, type):
        made = type("FunctionFilter", (FunctionFilter,), {"function": staticmethod(value), "__module__": __name__})
        _names[made] = name
        return made
    what = "is no tw.Filter and no function" if hasattr(module, part) else "is not there"
    raise ConfigError(f"{part!r} {what} in {module.__file__}", where=name,
                      mend="name a class that inherits from tw.Filter, or a function of one document")


def _module(module_name: str, name: str, folder: str) -> ModuleType:
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that nothing there can stand in for an installed package
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"the module of the filter needs {error.name!r}, which is not installed", where=name,
                              mend=f"pip install it, on every node; the filter is in {module_name}") from None
        raise ConfigError(f"there is no module {module_name!r} in {folder} or among the installed packages",
                          where=name, mend="run from the folder that holds it; on a cluster, submit with "
                          "--working-dir") from None


@lru_cache(maxsize=64)
def source_hash(name: str) -> str:
    """Return the hash of the source that a filter may follow from: its module, or all of the package it is in."""
    module = sys.modules[name.partition(":")[0]]
    top = sys.modules[module.__name__.partition(".")[0]]
    folders = list(getattr(top, "__path__", ()))
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.py")) if folders else [
        Path(str(module.__file__))]
    parts = [f"{path.name if not folders else path.relative_to(folders[0])}\n".encode() + path.read_bytes()
             for path in files]
    return content_hash(b"\0".join(parts))


def root_of(name: str) -> str:
    """Return the folder from which the module is found."""
    top = sys.modules[name.partition(":")[0].partition(".")[0]]
    return str(Path(str(top.__file__)).resolve().parents[1 if hasattr(top, "__path__") else 0])


def bound(settings: Filter) -> dict[str, Any]:
    """Return the JSON form of a filter for workers, with where its source is and what it must be."""
    name = name_of(settings)
    return {**settings.canonical(), CODE: {"root": root_of(name), "hash": source_hash(name)}}


def identity(settings: Filter) -> dict[str, Any]:
    """Return the JSON form of a filter for keys: the settings that differ from their defaults, and its source."""
    return {**settings.decisive(), CODE: source_hash(name_of(settings))}


def received(name: str, values: Mapping[str, Any]) -> Filter:
    """Return a filter from the JSON form that `bound` gave.

    Raises:
        ConfigError: its module is not on this node, or has another source here.
    """
    settings = {key: value for key, value in values.items() if key != CODE}
    code = values.get(CODE)
    if code is None:
        return find(name).model_validate(settings)
    if code["root"] not in sys.path and Path(code["root"]).is_dir():
        sys.path.append(code["root"])
    found = find(name)
    if source_hash(name) != code["hash"]:
        raise ConfigError("the source of the filter is another one on this node than where the run began", where=name,
                          mend="bring every node to the same version, or submit with --working-dir, and run again")
    return found.model_validate(settings)
