"""Training of a tokenizer on a sample of the documents in files; the sample depends only on the set of their texts."""

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

_TESTED = 0.05  # bytes of test texts as a share of the sample's bytes


class Sample:
    """Sample of the texts with the smallest content hashes, which depends only on the set of texts.

    Args:
        max_bytes: size of the sample; the text that reaches it is the last one. Repeated texts count once. The sample
            needs about twice as much memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tested = int(max_bytes * _TESTED) + 1
        self._held: dict[bytes, tuple[str, int]] = {}
        self._bytes = 0

    def add(self, text: str) -> None:
        """Add a text."""
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
        """Return the texts to train on and to test on. No other text can become part of the sample later."""
        parts: tuple[list, list] = ([], [])
        total = 0
        for digest, entry in sorted(self._held.items()):
            if total >= self._max_bytes + self._tested:
                break
            parts[total >= self._max_bytes].append((digest, entry))
            total += entry[1]
        return parts

    def texts(self) -> tuple[list[str], list[str]]:
        """Return (texts to train on, texts to test on), in order of their hash."""
        first, second = self._split()
        return [text for _, (text, _) in first], [text for _, (text, _) in second]


@dataclass(frozen=True)
class Trained:
    """Trained tokenizer.

    Args:
        tokenizer: content of the tokenizer.json.
        documents: number of documents read.
        unusable: number of unusable records.
        sample_documents: number of documents trained on.
        sample_bytes: bytes of text trained on.
        vocabulary_size: number of tokens; less than requested if the sample has no more repeated pairs.
        bytes_per_token: bytes per token of the test texts; None if there are none.
    """

    tokenizer: bytes
    documents: int
    unusable: int
    sample_documents: int
    sample_bytes: int
    vocabulary_size: int
    bytes_per_token: float | None

    def figures(self) -> dict[str, Any]:
        """Return all fields except the tokenizer."""
        return {name: value for name, value in asdict(self).items() if name != "tokenizer"}


def train_tokenizer(patterns: Sequence[str], *, field: str = "text", vocabulary_size: int, sample_bytes: int,
                    special_tokens: Sequence[str] = ()) -> Trained:
    """Read files, sample their documents and train a byte-level BPE.

    Args:
        patterns: files, or patterns with * and ?, local or s3://.
        field: field of a record that contains the text.
        vocabulary_size: maximum number of tokens.
        sample_bytes: bytes of text to train on.
        special_tokens: special tokens in addition to the end of text and the padding token.

    Raises:
        ConfigError: the vocabulary or the sample is too small.
        InputError: no file matches, a file cannot be read, or no record is usable.
    """
    least = MIN_VOCABULARY + len(special_tokens)
    if vocabulary_size < least or sample_bytes < 1:
        raise ConfigError(f"a vocabulary of {vocabulary_size} and a sample of {sample_bytes} bytes",
                          where="train-tokenizer", fix=f"the vocabulary needs {least} tokens, the sample a byte")
    sample = Sample(sample_bytes)
    documents = 0
    unusable = 0
    files = [(folder, key) for pattern in patterns for folder, key in matching(pattern)]
    config = ReadConfig(paths=tuple(patterns), text=field)
    with bars() as group:
        with group.bar("reading", len(files), unit="files") as bar:
            for folder, key in files:
                for record in _records(folder, key, config):
                    if isinstance(record, str):
                        sample.add(record)
                        documents += 1
                    else:
                        unusable += 1
                bar.advance(note=f"{documents:,} documents")
        texts, tested = sample.texts()
        if not texts:
            raise InputError(f"none of {unusable} records can be used", where=", ".join(patterns),
                             fix="name the field that contains the text with --text")
        trained_bytes = sum(len(text.encode()) for text in texts)
        with group.bar("training", 1, unit="tokenizer") as bar:
            bar.update(0, note=f"{trained_bytes:,} bytes, {vocabulary_size:,} tokens")
            data = train_bpe(texts, vocabulary_size, special_tokens)
            bar.update(1)
    encoder = load(data)
    tokens = len(encoder.encode_plain(tested)[0])
    rate = round(sum(len(text.encode()) for text in tested) / tokens, 4) if tokens else None
    return Trained(data, documents, unusable, len(texts), trained_bytes, encoder.vocabulary_size, rate)


def _records(folder: Store, key: str, config: ReadConfig) -> Iterator[str | Bad]:
    try:
        for record in read_records(folder, key, config):
            yield record if isinstance(record, Bad) else record.text
    except UnreadableFile as error:
        raise InputError(f"cannot be read to its end ({error})", where=folder.at(key),
                         fix="fix the file, or leave it out") from None


def matching(pattern: str) -> list[tuple[Store, str]]:
    """Return the files that match a pattern, each as a store and a key.

    Raises:
        InputError: no file matches.
    """
    parts = pattern.split("/")
    last = len(parts) - 1
    first_wild = next((index for index, part in enumerate(parts) if any(mark in part for mark in "*?[")), last)
    path = "/".join(parts[:first_wild])
    folder = store(path or ("/" if pattern.startswith("/") else "."))
    matches = [(folder, key) for key in folder.glob("/".join(parts[first_wild:]))]
    if not matches:
        raise InputError(f"no file matches {pattern!r}", where=folder.uri,
                         fix="correct the pattern; *, ? and ** (any folders) are allowed")
    return matches
