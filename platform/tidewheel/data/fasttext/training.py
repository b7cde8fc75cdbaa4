"""Training of a quality classifier from documents that are wanted and documents that are not.

fastText with word bigrams, as DCLM trains its own (Li et al. 2024, arXiv:2406.11794, section 4.4). One thread and
an order that only the content decides: the same documents give the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from pydantic import Field

from tidewheel.config import Config
from tidewheel.data.config import ReadConfig
from tidewheel.data.fasttext import OTHER, WANTED
from tidewheel.data.fasttext import model as fasttext_model
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import read_records
from tidewheel.errors import ConfigError, InputError
from tidewheel.private_folders import temporary_folder
from tidewheel.storage import split, store

_HELD_OUT_SEED, _ORDER_SEED = 1, 2
_MIN_HELD_OUT = 10
# What floret, the fork of fastText that trains here, writes into the header beyond fastText's own format.
_FLORET_EXTRA = slice(52, 60)
_FASTTEXT_MODE = (1, 1)


class TrainClassifier(Config):
    """How a classifier is trained. Long documents move a model slowly: the rate is higher than fastText's own."""

    epochs: int = Field(5, ge=1)
    """Passes over the documents."""
    learning_rate: float = Field(0.5, gt=0)
    """Learning rate at the start; it falls to 0."""
    word_ngrams: int = Field(2, ge=1, le=5)
    """Longest sequence of words that is a feature."""
    dimension: int = Field(16, ge=1, le=1024)
    """Length of the vectors. Two labels need few."""
    buckets: int = Field(1_000_000, ge=1)
    """Rows that word n-grams are hashed into."""
    min_count: int = Field(2, ge=1)
    """Words seen fewer times are no features of their own."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of the documents, chosen by the hash of their text, that is kept for the test."""
    keep: float = Field(0.1, gt=0, lt=1)
    """Share of documents like the unwanted ones that the threshold told lets through."""
    seed: int = Field(0, ge=0)
    """Seed of the vectors."""


@dataclass(frozen=True)
class Quality:
    """How a classifier does on documents it was not trained on.

    Args:
        positives, negatives: documents in the test.
        auc: probability that a wanted document scores higher than an unwanted one.
        threshold: score that lets the share `keep` of the unwanted through.
        kept: that share, as measured (scores may be equal).
        precision, recall: at the threshold; `precision_half`, `recall_half` at 0.5.
    """

    positives: int
    negatives: int
    auc: float
    threshold: float
    kept: float
    precision: float
    recall: float
    precision_half: float
    recall_half: float


@dataclass(frozen=True)
class Trained:
    """A trained classifier: the model's bytes, its test, the number of documents it was trained on, and of those left
    out because both sets have them."""

    model: bytes
    quality: Quality
    trained: int
    in_both: int


def train(positive: Sequence[str], negative: Sequence[str], settings: TrainClassifier) -> Trained:
    """Train and test. Texts that come twice count once; those of both sets count in neither.

    Raises:
        ConfigError: the package that trains is not installed.
        InputError: one of the sets is too small.
    """
    wanted, others = _by_hash(positive), _by_hash(negative)
    both = wanted.keys() & others.keys()
    parts = [_parts({key: text for key, text in found.items() if key not in both}, settings.held_out)
             for found in (wanted, others)]
    (wanted_train, wanted_test), (others_train, others_test) = parts
    for name, found in (("wanted", wanted_test), ("unwanted", others_test)):
        if len(found) < _MIN_HELD_OUT:
            raise InputError(f"only {len(found)} of the {name} documents are held out for the test, "
                             f"{_MIN_HELD_OUT} are needed", where="train-classifier",
                             fix="give more documents, or a larger --held-out")
    rows = [(key, WANTED, text) for key, text in wanted_train] + [(key, OTHER, text) for key, text in others_train]
    rows.sort(key=lambda row: (_hash(row[0], _ORDER_SEED), row[0]))
    with temporary_folder("classifier") as folder:
        model = _fit(rows, settings, folder)
        path = folder / "model.bin"
        path.write_bytes(model)
        loaded = fasttext_model.Model(fasttext_model.library().load_model(str(path)),
                                      fasttext_model.check(model, "the trained model"))
    scores = [loaded.scores([text for _, text in found], WANTED) for found in (wanted_test, others_test)]
    return Trained(model, measure(*scores, keep=settings.keep), len(rows), len(both))


def _by_hash(texts: Iterable[str]) -> dict[str, str]:
    return {xxhash.xxh3_128_hexdigest(text.encode()): text for text in texts}


def _hash(key: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(key.encode(), seed)


def _parts(texts: dict[str, str], held_out: float) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(to train on, to test on), each (hash, text) in order of hash."""
    limit = int(held_out * (1 << 64))
    parts: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for key in sorted(texts):
        parts[_hash(key, _HELD_OUT_SEED) < limit].append((key, texts[key]))
    return parts


def _fit(rows: Sequence[tuple[str, str, str]], settings: TrainClassifier, folder: Path) -> bytes:
    try:
        import floret
    except ModuleNotFoundError:
        raise ConfigError("the package floret is not installed", where="train-classifier",
                          fix="pip install 'tidewheel[classify]'") from None
    path = folder / "train.txt"
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for _, label, text in rows:
            file.write(f"{label} {fasttext_model.one_line(text)}\n")
    model = floret.train_supervised(
        str(path), epoch=settings.epochs, lr=settings.learning_rate, wordNgrams=settings.word_ngrams,
        dim=settings.dimension, bucket=settings.buckets, minCount=settings.min_count, seed=settings.seed, thread=1,
        verbose=0)
    written = folder / "floret.bin"
    model.save_model(str(written))
    return _plain(written.read_bytes())


def _plain(data: bytes) -> bytes:
    """A model that floret wrote, in fastText's format: without floret's two own values (mode and hash count)."""
    if struct.unpack_from("<2i", data, _FLORET_EXTRA.start) != _FASTTEXT_MODE:
        raise AssertionError("floret wrote another header than expected")
    return data[: _FLORET_EXTRA.start] + data[_FLORET_EXTRA.stop :]


def measure(positive: np.ndarray, negative: np.ndarray, *, keep: float) -> Quality:
    """Compare the scores of wanted [p] and unwanted [n] documents; `keep` is the share of the latter let through."""
    threshold = float(np.sort(negative)[-max(round(keep * len(negative)), 1)])
    precision, recall = _at(positive, negative, threshold)
    precision_half, recall_half = _at(positive, negative, 0.5)
    return Quality(len(positive), len(negative), auc(positive, negative), threshold,
                   float((negative >= threshold).mean()), precision, recall, precision_half, recall_half)


def auc(positive: np.ndarray, negative: np.ndarray) -> float:
    """Area under the receiver operating characteristic, equal scores counted half (Mann and Whitney 1947)."""
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left")
    equal = np.searchsorted(ordered, positive, "right") - below
    return float((below + 0.5 * equal).sum() / (len(positive) * len(negative)))


def _at(positive: np.ndarray, negative: np.ndarray, threshold: float) -> tuple[float, float]:
    """(precision, recall) when what scores `threshold` or more counts as wanted."""
    found, wrong = int((positive >= threshold).sum()), int((negative >= threshold).sum())
    return found / max(found + wrong, 1), found / len(positive)


def read_texts(pattern: str, *, field: str = "text") -> tuple[list[str], int]:
    """(texts of the documents in the files that match, records that could not be used).

    Raises:
        InputError: no file matches, or no record of them can be used.
    """
    place, keys = _matching(pattern)
    config = ReadConfig(paths=(pattern,), text=field)
    texts: list[str] = []
    bad: list[Bad] = []
    for key in keys:
        for record in read_records(place, key, config):
            if isinstance(record, Bad):
                bad.append(record)
            else:
                texts.append(record.text)
    if not texts:
        told = f"{len(bad)} records cannot be used: {bad[0].reason} ({bad[0].detail})" if bad else "there is no record"
        raise InputError(told, where=pattern, fix="name the field of the text with --text")
    return texts, len(bad)


def _matching(pattern: str) -> tuple[Any, list[str]]:
    parts = pattern.split("/")
    wild = next((place for place, part in enumerate(parts) if any(mark in part for mark in "*?[")), None)
    if wild is None:
        place, name = split(pattern)
        keys = [name] if place.exists(name) else []
    else:
        place = store("/".join(parts[:wild]) or ("/" if pattern.startswith("/") else "."))
        keys = sorted(place.glob("/".join(parts[wild:])))
    if not keys:
        raise InputError("no file matches", where=pattern, fix="give a file or a pattern with *, ? or **")
    return place, keys
