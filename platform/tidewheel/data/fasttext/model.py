"""Validation, loading and inference of models in fastText's binary format.

fastText's loader trusts the file, so a truncated or forged one can crash the process. `check` validates the whole
layout first (versions 11 and 12, dense and quantised: Joulin et al. 2016, arXiv:1612.03651).
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
_TRUNCATED = "it is truncated"


@dataclass(frozen=True)
class Layout:
    """Layout of a model file.

    Args:
        labels: its labels, with their prefix.
        dimension: length of its vectors.
        word_ngrams: words of the longest n-gram that is a feature.
    """

    labels: tuple[str, ...]
    dimension: int
    word_ngrams: int


class _Reader:
    """Sequential reader of a little-endian file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.position)  # struct.error at the end of the file
        self.position += struct.calcsize(f"<{layout}")
        return values

    def skip(self, count: int) -> bytes:
        if count < 0 or self.position + count > len(self.data):
            raise ValueError(_TRUNCATED)
        self.position += count
        return self.data[self.position - count : self.position]


def check(data: bytes, where: str) -> Layout:
    """Validate a model file and return its layout.

    Args:
        data: the file.
        where: its name, for errors.

    Raises:
        ConfigError: the file is not a fastText classifier, or is damaged.
    """
    reader = _Reader(data)
    try:
        magic, version = reader.take("ii")
        if magic != MAGIC or version not in _VERSIONS:
            raise ValueError("the header is not fastText's")
        return _validate(reader)
    except (ValueError, struct.error) as error:
        reason = _TRUNCATED if isinstance(error, struct.error) else str(error)
        raise ConfigError(f"not a classifier in fastText's format: {reason}", where=where,
                          fix="give a .bin or .ftz file of a supervised fastText model; `tidewheel data "
                              "train-classifier` writes one") from None


def _validate(reader: _Reader) -> Layout:
    (dimension, _, _, _, _, word_ngrams, loss, model, bucket, _, longest, _, _) = reader.take("12id")
    _require(model == _SUPERVISED, "the model is not supervised")
    _require(dimension > 0 and bucket >= 0 and 1 <= loss <= 4, "its settings are invalid")
    _require(bucket > 0 or (word_ngrams <= 1 and longest <= 0), "it has n-grams but no rows for them")
    words, labels, pruned = _dictionary(reader)
    rows = words + (bucket if pruned < 0 else pruned)
    (quantised,) = reader.take("?")
    _matrix(reader, quantised, rows, dimension)
    (quantised,) = reader.take("?")
    _matrix(reader, quantised, len(labels), dimension)
    _require(reader.position == len(reader.data), "there is data after the model")
    return Layout(labels, dimension, word_ngrams)


def _dictionary(reader: _Reader) -> tuple[int, tuple[str, ...], int]:
    """Return (number of words, labels, number of rows of pruned n-grams or -1)."""
    size, words, count, _, pruned = reader.take("iiiqq")
    _require(words >= 0 and count > 0 and size == words + count, "its dictionary is invalid")
    labels = []
    for index in range(size):
        end = reader.data.find(b"\0", reader.position)
        _require(end >= 0, _TRUNCATED)
        name = reader.skip(end - reader.position + 1)[:-1]
        _, kind = reader.take("qb")
        _require(kind == (index >= words), "its dictionary is out of order")
        if kind:
            labels.append(name.decode("utf-8"))  # a UnicodeDecodeError is a ValueError
    if pruned > 0:
        pairs = np.frombuffer(reader.skip(8 * pruned), "<i4")
        _require(bool(((pairs[1::2] >= 0) & (pairs[1::2] < pruned)).all()), "its pruned n-grams are invalid")
    return words, tuple(labels), pruned


def _matrix(reader: _Reader, quantised: bool, rows: int, columns: int) -> None:
    if not quantised:
        _require(reader.take("qq") == (rows, columns), "a matrix has the wrong size")
        reader.skip(4 * rows * columns)
        return
    norms, *size, codes = reader.take("?qqi")
    _require(size == [rows, columns], "a matrix has the wrong size")
    reader.skip(codes)
    _require(codes == rows * _quantizer(reader, columns), "a matrix has the wrong size")
    if norms:
        reader.skip(rows)
        _quantizer(reader, 1)


def _quantizer(reader: _Reader, dimension: int) -> int:
    """Return the number of sub-vectors of a product quantizer."""
    whole, parts, part, last = reader.take("4i")
    is_valid = whole == dimension and parts > 0 and 0 < last <= part and (parts - 1) * part + last == whole
    _require(is_valid, "a quantizer is invalid")
    reader.skip(4 * whole * _PRODUCT_CENTROIDS)
    return parts


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def layout(reference: str) -> Layout:
    """Return the layout of the model at a reference (`resources`) or path. It raises the same errors as `load`."""
    library()
    return check(resources.read(reference), reference.rpartition("@")[2])


@lru_cache(maxsize=4)
def load(reference: str) -> Model:
    """Validate and load the model at a reference (`resources`) or path; each process loads it once.

    Raises:
        ConfigError: the file is not a fastText classifier, or the package for inference is not installed.
    """
    validated = layout(reference)
    with resources.local_path(reference) as path:
        return Model(library().load_model(str(path)), validated)


@dataclass(frozen=True)
class Model:
    """A loaded model."""

    model: Any
    layout: Layout

    def best(self, texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
        """Return the most likely label of each text and its probability, float32 [n]; "" and 0 if there is none.

        Labels are without their prefix.
        """
        predictions = [self._predict(text, 1) for text in texts]
        labels = [labels[0] if labels else "" for labels, _ in predictions]
        scores = [scores[0] if labels else 0.0 for labels, scores in predictions]
        return [label.removeprefix("__label__") for label in labels], np.array(scores, np.float32)

    def scores(self, texts: Sequence[str], label: str) -> np.ndarray:
        """Return the probability of `label`, from 0 to 1, for each text, float32 [n]."""
        predictions = [self._predict(text, len(self.layout.labels)) for text in texts]
        scores = [dict(zip(labels, values, strict=True)).get(label, 0.0) for labels, values in predictions]
        return np.array(scores, np.float32).clip(0, 1)

    def _predict(self, text: str, count: int) -> tuple[Sequence[str], Sequence[float]]:
        labels, scores = self.model.predict(one_line(text), k=count)
        return labels, scores


def one_line(text: str) -> str:
    """Return a document as one line, which is what fastText expects.

    fastText's end-of-line word is removed because it would cut off the rest, and the prefix of labels because it would
    turn words into labels.
    """
    return text.replace("\n", " ").replace("</s>", " ").replace("__label__", " ")


def versions() -> dict[str, str]:
    """Return the version of the package for inference, for unit keys; "" if it is not installed."""
    try:
        return {"fasttext-predict": importlib.metadata.version("fasttext-predict")}
    except importlib.metadata.PackageNotFoundError:
        return {"fasttext-predict": ""}


def library() -> Any:
    """Import and return the package for inference.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import fasttext
    except ModuleNotFoundError:
        raise ConfigError("the package fasttext-predict is not installed", where="filter", fix=_INSTALL) from None
    return fasttext
