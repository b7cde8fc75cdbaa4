"""Training of a quality classifier from good documents and poor documents.

It is a fastText model with word bigrams, as in DCLM (Li et al. 2024, arXiv:2406.11794, section 4.4). Training uses one
thread and orders documents by their content, so the same documents give the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from pydantic import Field

from tidewheel.config import Config
from tidewheel.data.config import ReadConfig
from tidewheel.data.fasttext import HIGH_QUALITY, LOW_QUALITY
from tidewheel.data.fasttext import model as fasttext_model
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import read_records
from tidewheel.errors import ConfigError, InputError
from tidewheel.private_folders import temporary_folder
from tidewheel.storage import split, store

_HELD_OUT_SEED = 1
_ORDER_SEED = 2
_MIN_HELD_OUT = 10
# The two values that floret, the fork of fastText used for training, adds to fastText's header.
_FLORET_EXTRA = slice(52, 60)
_FASTTEXT_MODE = (1, 1)


class TrainClassifier(Config):
    """Settings for training a classifier.

    Long documents change a model slowly, so the default learning rate is higher than fastText's.
    """

    epochs: int = Field(5, ge=1)
    """Passes over the documents."""
    learning_rate: float = Field(0.5, gt=0)
    """Learning rate at the start; it decays to 0."""
    word_ngrams: int = Field(2, ge=1, le=5)
    """Words of the longest n-gram that is a feature."""
    dimension: int = Field(16, ge=1, le=1024)
    """Length of the vectors. Two labels need short ones."""
    buckets: int = Field(1_000_000, ge=1)
    """Rows that word n-grams are hashed into."""
    min_count: int = Field(2, ge=1)
    """Minimum number of occurrences of a word that is a feature of its own."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of the documents held out for the test, chosen by the hash of their text."""
    keep: float = Field(0.1, gt=0, lt=1)
    """Share of the poor documents that the reported threshold keeps."""
    seed: int = Field(0, ge=0)
    """Seed of the vectors."""


@dataclass(frozen=True)
class Quality:
    """Quality of a classifier on held-out documents.

    Args:
        positives: number of good documents.
        negatives: number of poor documents.
        auc: probability that a good document scores higher than a poor one.
        threshold: score that keeps the share `keep` of the poor documents.
        kept: the share that the threshold keeps in fact, because scores may be equal.
        precision: precision at the threshold.
        recall: recall at the threshold.
        precision_half: precision at 0.5.
        recall_half: recall at 0.5.
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
    """Trained classifier.

    Args:
        model: the model file.
        quality: its quality on held-out documents.
        trained: number of documents it was trained on.
        in_both: number of documents left out because both sets contain them.
    """

    model: bytes
    quality: Quality
    trained: int
    in_both: int


def train(positive: Sequence[str], negative: Sequence[str], settings: TrainClassifier) -> Trained:
    """Train and test a classifier. Repeated texts count once, and texts of both sets are left out.

    Args:
        positive: texts of good documents.
        negative: texts of poor documents.
        settings: settings for training.

    Raises:
        ConfigError: the package for training is not installed.
        InputError: one of the sets is too small.
    """
    good = _by_hash(positive)
    poor = _by_hash(negative)
    both = good.keys() & poor.keys()
    good_train, good_test = _split(good, both, settings.held_out)
    poor_train, poor_test = _split(poor, both, settings.held_out)
    for name, held_out in (("positive", good_test), ("negative", poor_test)):
        if len(held_out) < _MIN_HELD_OUT:
            raise InputError(f"only {len(held_out)} of the {name} documents are held out for the test; the minimum is "
                             f"{_MIN_HELD_OUT}", where="train-classifier",
                             fix="give more documents, or a larger --held-out")
    rows = [(key, HIGH_QUALITY, text) for key, text in good_train]
    rows += [(key, LOW_QUALITY, text) for key, text in poor_train]
    rows.sort(key=lambda row: (_hash(row[0], _ORDER_SEED), row[0]))
    with temporary_folder("classifier") as folder:
        model = _fit(rows, settings, folder)
        path = folder / "model.bin"
        path.write_bytes(model)
        loaded = fasttext_model.Model(fasttext_model.library().load_model(str(path)),
                                      fasttext_model.check(model, "the trained model"))
    good_scores = loaded.scores([text for _, text in good_test], HIGH_QUALITY)
    poor_scores = loaded.scores([text for _, text in poor_test], HIGH_QUALITY)
    return Trained(model, measure(good_scores, poor_scores, keep=settings.keep), len(rows), len(both))


def _by_hash(texts: Iterable[str]) -> dict[str, str]:
    return {xxhash.xxh3_128_hexdigest(text.encode()): text for text in texts}


def _hash(key: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(key.encode(), seed)


def _split(texts: dict[str, str], excluded: Set[str], share: float
           ) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (documents to train on, held-out documents), each as (hash, text) in order of hash."""
    limit = int(share * (1 << 64))
    trained: list[tuple[str, str]] = []
    held_out: list[tuple[str, str]] = []
    for key in sorted(texts.keys() - excluded):
        part = held_out if _hash(key, _HELD_OUT_SEED) < limit else trained
        part.append((key, texts[key]))
    return trained, held_out


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
    """Convert floret's format to fastText's by removing the two values that floret adds (mode and hash count)."""
    if struct.unpack_from("<2i", data, _FLORET_EXTRA.start) != _FASTTEXT_MODE:
        raise AssertionError("floret wrote an unexpected header")
    return data[: _FLORET_EXTRA.start] + data[_FLORET_EXTRA.stop :]


def measure(positive: np.ndarray, negative: np.ndarray, *, keep: float) -> Quality:
    """Return the quality of a classifier, given its scores of held-out documents.

    Args:
        positive: scores of good documents [p].
        negative: scores of poor documents [n].
        keep: share of the poor documents that the threshold keeps.
    """
    threshold = float(np.sort(negative)[-max(round(keep * len(negative)), 1)])
    precision, recall = _at(positive, negative, threshold)
    precision_half, recall_half = _at(positive, negative, 0.5)
    return Quality(len(positive), len(negative), auc(positive, negative), threshold,
                   float((negative >= threshold).mean()), precision, recall, precision_half, recall_half)


def auc(positive: np.ndarray, negative: np.ndarray) -> float:
    """Return the area under the ROC curve; equal scores count half (Mann and Whitney 1947)."""
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left")
    equal = np.searchsorted(ordered, positive, "right") - below
    return float((below + 0.5 * equal).sum() / (len(positive) * len(negative)))


def _at(positive: np.ndarray, negative: np.ndarray, threshold: float) -> tuple[float, float]:
    """Return (precision, recall) if documents that score at least `threshold` are classified as good."""
    right = int((positive >= threshold).sum())
    wrong = int((negative >= threshold).sum())
    return right / max(right + wrong, 1), right / len(positive)


def read_texts(pattern: str, *, field: str = "text") -> tuple[list[str], int]:
    """Read the documents of all files that match a pattern.

    Args:
        pattern: a file, or a pattern with * and ?.
        field: field of a record that contains the text.

    Returns:
        (texts, number of unusable records).

    Raises:
        InputError: no file matches, or no record is usable.
    """
    folder, keys = _matches(pattern)
    config = ReadConfig(paths=(pattern,), text=field)
    texts: list[str] = []
    bad: list[Bad] = []
    for key in keys:
        for record in read_records(folder, key, config):
            if isinstance(record, Bad):
                bad.append(record)
            else:
                texts.append(record.text)
    if not texts:
        problem = f"{len(bad)} records cannot be used: {bad[0].reason} ({bad[0].detail})" if bad else "no records"
        raise InputError(problem, where=pattern, fix="name the field that contains the text with --text")
    return texts, len(bad)


def _matches(pattern: str) -> tuple[Any, list[str]]:
    """Return the store of a pattern and the keys that match."""
    parts = pattern.split("/")
    first_wild = next((index for index, part in enumerate(parts) if any(mark in part for mark in "*?[")), None)
    if first_wild is None:
        folder, name = split(pattern)
        keys = [name] if folder.exists(name) else []
    else:
        folder = store("/".join(parts[:first_wild]) or ("/" if pattern.startswith("/") else "."))
        keys = sorted(folder.glob("/".join(parts[first_wild:])))
    if not keys:
        raise InputError("no file matches", where=pattern, fix="give a file or a pattern with *, ? or **")
    return folder, keys
