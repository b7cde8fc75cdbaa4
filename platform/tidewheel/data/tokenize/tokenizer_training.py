"""Training of a tokenizer from files of documents, on a sample that only the set of their texts decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from tidewheel.console import bars
from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import UnreadableFile, read_records
from tidewheel.data.tokenize.tokenizer import MIN_VOCABULARY, train_bpe
from tidewheel.errors import ConfigError, InputError
from tidewheel.shards.tokenizer import load
from tidewheel.storage import Store, store

_TESTED = 0.05  # of the sample's bytes: text behind it in the order, which shows what the tokenizer does on new text


class Sample:
    """A sample of texts that only the set of texts decides: those with the smallest content hashes.

    Args:
        max_bytes: as many texts are taken as it needs to reach so many bytes. A text counts once, however often it is
            there. About twice as much is held in memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._tested = max_bytes, int(max_bytes * _TESTED) + 1
        self._held: dict[bytes, tuple[str, int]] = {}
        self._bytes = 0

    def add(self, text: str) -> None:
        """One more text."""
        raw = text.encode("utf-8")
        digest = xxhash.xxh3_128_digest(raw)
        if digest not in self._held:
            self._held[digest] = (text, len(raw))
            self._bytes += len(raw)
            if self._bytes > 2 * (self._max_bytes + self._tested):
                first, second = self._split()
                self._held = dict([*first, *second])
                self._bytes = sum(size for _, size in self._held.values())

    def _split(self) -> tuple[list[tuple[bytes, tuple[str, int]]], list[tuple[bytes, tuple[str, int]]]]:
        """What is trained on and what is tested on; the rest is not needed, whatever else will come."""
        parts: tuple[list, list] = ([], [])
        total = 0
        for digest, entry in sorted(self._held.items()):
            if total >= self._max_bytes + self._tested:
                break
            parts[total >= self._max_bytes].append((digest, entry))
            total += entry[1]
        return parts

    def texts(self) -> tuple[list[str], list[str]]:
        """(texts to train on, texts to test on), in order of their hash."""
        first, second = self._split()
        return [text for _, (text, _) in first], [text for _, (text, _) in second]


@dataclass(frozen=True)
class Trained:
    """A tokenizer and how it came about.

    Args:
        tokenizer: bytes of the tokenizer.json.
        documents: read from the files.
        unusable: records that could not be used.
        sample_documents, sample_bytes: trained on.
        vocabulary_size: tokens it has; fewer than asked for where the sample has no more pairs that repeat.
        bytes_per_token: on texts that it was not trained on, None where there were none left.
    """

    tokenizer: bytes
    documents: int
    unusable: int
    sample_documents: int
    sample_bytes: int
    vocabulary_size: int
    bytes_per_token: float | None

    def figures(self) -> dict[str, Any]:
        """Everything but the bytes."""
        return {name: value for name, value in asdict(self).items() if name != "tokenizer"}


def train_tokenizer(patterns: Sequence[str], *, field: str = "text", vocabulary_size: int, sample_bytes: int,
                    special_tokens: Sequence[str] = ()) -> Trained:
    """Read the files that match, sample their documents and train a byte-level BPE.

    Args:
        patterns: files, or patterns with * and ?, local or s3://.
        field: where a record has its text.
        vocabulary_size: tokens wanted.
        sample_bytes: text to train on.
        special_tokens: beside the end of text and the padding token.

    Raises:
        ConfigError: the vocabulary or the sample is too small.
        InputError: no file matches, one cannot be read, or no record can be used.
    """
    least = MIN_VOCABULARY + len(special_tokens)
    if vocabulary_size < least or sample_bytes < 1:
        raise ConfigError(f"a vocabulary of {vocabulary_size} and a sample of {sample_bytes} bytes",
                          where="train-tokenizer", fix=f"the vocabulary needs {least} tokens, the sample a byte")
    sample, documents, unusable = Sample(sample_bytes), 0, 0
    files = [(place, key) for pattern in patterns for place, key in matching(pattern)]
    config = ReadConfig(paths=tuple(patterns), text=field)
    with bars() as group:
        with group.bar("reading", len(files), unit="files") as bar:
            for place, key in files:
                for record in _records(place, key, config):
                    if isinstance(record, str):
                        sample.add(record)
                        documents += 1
                    else:
                        unusable += 1
                bar.advance(note=f"{documents:,} documents")
        texts, tested = sample.texts()
        if not texts:
            raise InputError(f"none of {unusable} records can be used", where=", ".join(patterns),
                             fix="name the field with the text with --text")
        trained_bytes = sum(len(text.encode()) for text in texts)
        with group.bar("training", 1, unit="tokenizer") as bar:
            bar.update(0, note=f"{trained_bytes:,} bytes, {vocabulary_size:,} tokens")
            data = train_bpe(texts, vocabulary_size, special_tokens)
            bar.update(1)
    encoder = load(data)
    tokens = len(encoder.encode_plain(tested)[0])
    rate = round(sum(len(text.encode()) for text in tested) / tokens, 4) if tokens else None
    return Trained(data, documents, unusable, len(texts), trained_bytes, encoder.vocabulary_size, rate)


def _records(place: Store, key: str, config: ReadConfig) -> Iterator[str | Bad]:
    try:
        for record in read_records(place, key, config):
            yield record if isinstance(record, Bad) else record.text
    except UnreadableFile as error:
        raise InputError(f"cannot be read to its end ({error})", where=place.at(key),
                         fix="fix the file, or leave it out") from None


def matching(pattern: str) -> list[tuple[Store, str]]:
    """Files that match a pattern, each as its store and key."""
    parts = pattern.split("/")
    wild = next((place for place, part in enumerate(parts) if any(mark in part for mark in "*?[")), len(parts) - 1)
    wild = min(wild, len(parts) - 1)
    folder = "/".join(parts[:wild])
    place = store(folder or ("/" if pattern.startswith("/") else "."))
    found = [(place, key) for key in place.glob("/".join(parts[wild:]))]
    if not found:
        raise InputError(f"no file matches {pattern!r}", where=place.uri,
                         fix="correct the pattern; it knows *, ? and ** for any folders")
    return found
