"""Models in fastText's own binary format: checked before they are loaded, then applied to documents.

The loader of fastText trusts what it reads; a file that is cut off or made up can crash the process. `check` walks
through the whole layout first (versions 11 and 12, dense and quantised: Joulin et al. 2016, arXiv:1612.03651).
"""

from __future__ import annotations

import importlib.metadata
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tidewheel.data import resources
from tidewheel.errors import ConfigError

MAGIC = 793712314
_VERSIONS = (11, 12)
_SUPERVISED = 3
_PRODUCT_CENTROIDS = 256
_INSTALL = "pip install 'tidewheel[classify]'"


@dataclass(frozen=True)
class Layout:
    """What a model file holds: its labels, the length of its vectors, the n-grams it looks at."""

    labels: tuple[str, ...]
    dimension: int
    word_ngrams: int


class _Reader:
    """Values of a little-endian file, one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.place)  # struct.error when the file ends
        self.place += struct.calcsize(f"<{layout}")
        return values

    def skip(self, count: int) -> bytes:
        if count < 0 or self.place + count > len(self.data):
            raise ValueError("it ends early")
        self.place += count
        return self.data[self.place - count : self.place]


def check(data: bytes, where: str) -> Layout:
    """What the model file `data` holds.

    Raises:
        ConfigError: it is no fastText classifier, or is damaged.
    """
    reader = _Reader(data)
    try:
        magic, version = reader.take("ii")
        if magic != MAGIC or version not in _VERSIONS:
            raise ValueError("it does not begin like one")
        return _walk(reader)
    except (ValueError, struct.error) as error:
        reason = "it ends early" if isinstance(error, struct.error) else str(error)
        raise ConfigError(f"not a classifier in fastText's format: {reason}", where=where,
                          fix="give a .bin or .ftz file of a supervised fastText model, such as "
                              "`tidewheel data train-classifier` writes") from None


def _walk(reader: _Reader) -> Layout:
    (dimension, _, _, _, _, word_ngrams, loss, model, bucket, _, longest, _, _) = reader.take("12id")
    _require(model == _SUPERVISED, "the model is not supervised")
    _require(dimension > 0 and bucket >= 0 and 1 <= loss <= 4, "its settings make no sense")
    _require(bucket > 0 or (word_ngrams <= 1 and longest <= 0), "it has n-grams but no place for them")
    words, labels, pruned = _dictionary(reader)
    rows = words + (bucket if pruned < 0 else pruned)
    (quantised,) = reader.take("?")
    _matrix(reader, quantised, rows, dimension)
    (quantised,) = reader.take("?")
    _matrix(reader, quantised, len(labels), dimension)
    _require(reader.place == len(reader.data), "there is more than a model in it")
    return Layout(labels, dimension, word_ngrams)


def _dictionary(reader: _Reader) -> tuple[int, tuple[str, ...], int]:
    """(words, labels, rows that n-grams were pruned to or -1)."""
    size, words, count, _, pruned = reader.take("iiiqq")
    _require(words >= 0 and count > 0 and size == words + count, "its dictionary makes no sense")
    labels = []
    for place in range(size):
        end = reader.data.find(b"\0", reader.place)
        _require(end >= 0, "it ends early")
        name = reader.skip(end - reader.place + 1)[:-1]
        _, kind = reader.take("qb")
        _require(kind == (place >= words), "its dictionary is out of order")
        if kind:
            labels.append(name.decode("utf-8"))  # a UnicodeDecodeError is a ValueError
    if pruned > 0:
        pairs = np.frombuffer(reader.skip(8 * pruned), "<i4")
        _require(bool(((pairs[1::2] >= 0) & (pairs[1::2] < pruned)).all()), "its pruned n-grams make no sense")
    return words, tuple(labels), pruned


def _matrix(reader: _Reader, quantised: bool, rows: int, columns: int) -> None:
    if not quantised:
        _require(reader.take("qq") == (rows, columns), "a matrix has another size than it should")
        reader.skip(4 * rows * columns)
        return
    norms, *size, codes = reader.take("?qqi")
    _require(size == [rows, columns], "a matrix has another size than it should")
    reader.skip(codes)
    _require(codes == rows * _quantizer(reader, columns), "a matrix has another size than it should")
    if norms:
        reader.skip(rows)
        _quantizer(reader, 1)


def _quantizer(reader: _Reader, dimension: int) -> int:
    """Sub-vectors of a product quantizer."""
    whole, parts, part, last = reader.take("4i")
    sound = whole == dimension and parts > 0 and 0 < last <= part and (parts - 1) * part + last == whole
    _require(sound, "a quantizer makes no sense")
    reader.skip(4 * whole * _PRODUCT_CENTROIDS)
    return parts


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def layout(reference: str) -> Layout:
    """What the model of a reference (`resources`) or path holds; raises as `load`."""
    library()
    return check(resources.read(reference), reference.rpartition("@")[2])


@lru_cache(maxsize=4)
def load(reference: str) -> Model:
    """The model of a reference (`resources`) or path, checked; once a process.

    Raises:
        ConfigError: it is no such model, or the package that applies it is not installed.
    """
    found = layout(reference)
    with resources.local_path(reference) as path:
        return Model(library().load_model(str(path)), found)


@dataclass(frozen=True)
class Model:
    """A loaded model."""

    model: Any
    layout: Layout

    def best(self, texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
        """(label without its prefix, its probability float32 [n]) of each text; "" and 0 where there is none."""
        found = [self._predict(text, 1) for text in texts]
        labels = [labels[0] if labels else "" for labels, _ in found]
        scores = [scores[0] if labels else 0.0 for labels, scores in found]
        return [label.removeprefix("__label__") for label in labels], np.array(scores, np.float32)

    def scores(self, texts: Sequence[str], label: str) -> np.ndarray:
        """Probability of `label`, from 0 to 1, float32 [n]."""
        found = [self._predict(text, len(self.layout.labels)) for text in texts]
        return np.array([dict(zip(*each, strict=True)).get(label, 0.0) for each in found], np.float32).clip(0, 1)

    def _predict(self, text: str, count: int) -> tuple[Sequence[str], Sequence[float]]:
        labels, scores = self.model.predict(one_line(text), k=count)
        return labels, scores


def one_line(text: str) -> str:
    """A document as fastText takes one: a line. In a text, fastText's end-of-line word would cut the rest off, and its
    prefix of labels would make labels of words."""
    return text.replace("\n", " ").replace("</s>", " ").replace("__label__", " ")


def versions() -> dict[str, str]:
    """Version of the package that applies models, for unit keys; "" when it is not installed."""
    try:
        return {"fasttext-predict": importlib.metadata.version("fasttext-predict")}
    except importlib.metadata.PackageNotFoundError:
        return {"fasttext-predict": ""}


def library() -> Any:
    try:
        import fasttext
    except ModuleNotFoundError:
        raise ConfigError("the package fasttext-predict is not installed", where="filter", fix=_INSTALL) from None
    return fasttext
