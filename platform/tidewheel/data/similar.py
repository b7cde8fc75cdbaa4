"""Search a near-duplicate index for documents similar to given texts, and convert the index to `datasketch` objects.

`dedup_near: {write_index: true}` writes the index (`stages.near_index`): the signature of every document, bit-identical
to that of a datasketch 2.0 `MinHash(scheme="affine32")` of the document's shingle hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tidewheel.config import build
from tidewheel.data.config import DedupNearStep, ReadConfig
from tidewheel.data.dedup.minhash import MINHASH_VERSION, permutations
from tidewheel.data.quarantine import REASONS, Bad
from tidewheel.data.readers import Record, UnreadableFile, read_records
from tidewheel.data.stage import read_batches
from tidewheel.data.stages import keys, near_edges, near_index
from tidewheel.errors import ConfigError, InputError, StorageError
from tidewheel.storage import absolute, split, store

if TYPE_CHECKING:
    from datasketch import MinHash, MinHashLSH

_COLUMNS = ("id", "hash_hi", "hash_lo", "shingles", "signature", "kept")
_QUERIES_AT_ONCE = 512
"""Signatures compared with a batch of the index (8,192 documents) at a time: 16 MiB of counts."""
_TEXT_BYTES = 16 << 20
_TEXTS = 1024


@dataclass(frozen=True)
class Match:
    """A document of an index that is similar to a text.

    Args:
        id: id of the document.
        similarity: estimated Jaccard similarity of the shingle sets: the share of equal signature values.
        kept: False if near-deduplication dropped the document; the index contains it nevertheless.
    """

    id: str
    similarity: float
    kept: bool


@dataclass(frozen=True)
class SignedFile:
    """The documents of a file, without their texts.

    Args:
        ids: ids of n documents.
        lines: line or row of each document, from 1.
        signatures: uint32 [n, k].
        unusable: number of records that cannot be used, by reason (`quarantine.REASONS`).
    """

    ids: list[str]
    lines: list[int]
    signatures: np.ndarray
    unusable: dict[str, int]


@dataclass
class Unusable:
    """Counter of the records that cannot be used; it keeps the first."""

    counts: Counter[str] = field(default_factory=Counter)
    first: Bad | None = None

    def add(self, record: Bad) -> None:
        """Count a record."""
        self.counts[record.reason] += record.records
        self.first = self.first or record


class SimilarityIndex:
    """A near-duplicate index on storage; searches use the parameters that the index was made with.

    The index is read in batches, so it may be larger than memory. Each search reads all of it once.

        index = tw.SimilarityIndex("s3://bucket/clean/2026-10/near_index")
        for match in index.similar(["some text"])[0]:
            print(match.id, match.similarity)

    Args:
        uri: the folder `near_index` below the output of a pipeline.

    Raises:
        InputError: the index is missing or damaged, or has another version of signatures.
    """

    def __init__(self, uri: str | Path) -> None:
        self.uri = absolute(uri)
        manifest = near_index.read_manifest(self.uri)
        self.settings = _settings(manifest.parameters, store(self.uri).at(near_index.MANIFEST))
        self._files = manifest.files
        self._documents = manifest.documents
        self._permutations = np.array(permutations(self.settings.num_permutations, self.settings.seed))

    def __len__(self) -> int:
        """Return the number of documents, including those that near-deduplication dropped."""
        return self._documents

    def signatures(self, texts: Sequence[str]) -> np.ndarray:
        """Return the signatures of texts, [n, k] uint32, as the index holds them.

        The hash of the whole text stands for the signature of a text without shingles (fewer words than `ngram`, or
        numbers only): it equals the signature of the same text and of no other.
        """
        step = self.settings
        column = pa.array(texts, pa.large_string())
        made = {"ngram": step.ngram, "num_permutations": step.num_permutations, "seed": step.seed, "unit": step.unit}
        return near_edges.signatures(pa.table(keys.columns(column, made)))

    def minhash(self, text: str) -> MinHash:
        """Return the signature of a text as a `datasketch.MinHash`.

        Its `hashfunc` is `int`: `update` takes the 32-bit hash of a shingle, as `minhash.shingle_hashes` gives it.
        """
        return self._sketch(self.signatures([text])[0])

    def minhashes(self) -> Iterator[tuple[str, MinHash]]:
        """Yield the id and the `datasketch.MinHash` of every document of the index.

        Raises:
            InputError, StorageError: a file of the index is missing or damaged.
        """
        for table in self._tables():
            ids = table["id"].to_pylist()
            for identity, values in zip(ids, near_edges.signatures(table), strict=True):
                yield identity, self._sketch(values)

    def lsh(self) -> MinHashLSH:
        """Return all documents in a `datasketch.MinHashLSH` with the bands and rows of the index.

        It needs memory for the whole index, about 2 KB for each document; `similar` does not.

        Raises:
            InputError: the index has one band, which datasketch does not support; or a file is missing or damaged.
            StorageError: a file of the index is damaged.
        """
        from datasketch import MinHashLSH

        step = self.settings
        if step.bands < 2:
            raise InputError("the index has one band, and MinHashLSH needs two", where=self.uri,
                             fix="insert minhashes() into a MinHashLSH with bands of your own")
        lsh = MinHashLSH(num_perm=step.num_permutations, params=(step.bands, step.rows))
        for identity, sketch in self.minhashes():
            lsh.insert(identity, sketch)
        return lsh

    def similar(self, texts: Sequence[str], *, min_jaccard: float | None = None, limit: int = 10
                ) -> list[list[Match]]:
        """Return the documents most similar to each text, best first.

        Args:
            texts: the texts.
            min_jaccard: minimum estimated similarity; the default is that of the index.
            limit: maximum number of matches for a text.

        Raises:
            ConfigError: as `nearest`.
            InputError: as `nearest`.
            StorageError: as `nearest`.
        """
        return self.nearest(self.signatures(texts), min_jaccard=min_jaccard, limit=limit)

    def nearest(self, signatures: np.ndarray, *, min_jaccard: float | None = None, limit: int = 10
                ) -> list[list[Match]]:
        """Return the documents most similar to each signature, best first.

        It compares every document, not only documents that share a band, so the result is complete for any threshold.

        Args:
            signatures: uint32 [n, k], from `signatures`.
            min_jaccard: minimum estimated similarity; the default is that of the index.
            limit: maximum number of matches for a signature. Ties go to the smaller id.

        Raises:
            ConfigError: min_jaccard or limit is out of range.
            InputError: a file of the index is missing or invalid.
            StorageError: a file of the index is damaged.
        """
        threshold = self.settings.min_jaccard if min_jaccard is None else min_jaccard
        if not 0 < threshold <= 1:
            raise ConfigError(f"a similarity is above 0 and at most 1, got {threshold:g}", where="min_jaccard",
                              fix="0.7 for texts that share most of their shingles")
        if limit < 1:
            raise ConfigError(f"{limit} matches of a document", where="limit", fix="1 or more")
        count = self.settings.num_permutations
        similarities = np.arange(count + 1) / count
        least = int(np.argmax(similarities >= threshold))
        distinct, groups = np.unique(signatures.reshape(-1, count), axis=0, return_inverse=True)
        best: list[list[Match]] = [[] for _ in distinct]
        for table in self._tables() if len(distinct) else ():
            values = near_edges.signatures(table)
            for first in range(0, len(distinct), _QUERIES_AT_ONCE):
                equal = equal_values(distinct[first : first + _QUERIES_AT_ONCE], values)
                for query in np.flatnonzero((equal >= least).any(axis=1)).tolist():
                    rows = np.flatnonzero(equal[query] >= least)
                    matches = _matches(table, rows, similarities[equal[query][rows]])
                    best[first + query] = _best([*best[first + query], *matches], limit)
        return [list(best[group]) for group in groups.reshape(-1).tolist()]

    def sign_file(self, uri: str, *, text: str = "text", id: str | None = "id") -> SignedFile:
        """Return the signatures of the documents of a file, in any format that pipelines read.

        Args:
            uri: URI of the file.
            text: field with a document's text.
            id: field with its id; the id of a document without it is the hash of its text.

        Raises:
            InputError: the file is missing or cannot be read, or none of its records can be used.
        """
        folder, name = split(uri)
        if not folder.exists(name):
            raise InputError("there is no such file", where=uri, fix="give the path or URI of one file of documents")
        ids: list[str] = []
        lines: list[int] = []
        unusable = Unusable()
        signed = [np.zeros((0, self.settings.num_permutations), np.uint32)]
        config = ReadConfig(paths=(uri,), text=text, id=id)
        try:
            for records in _groups(read_records(folder, name, config), unusable):
                ids += [record.id for record in records]
                lines += [record.line for record in records]
                signed.append(self.signatures([record.text for record in records]))
        except UnreadableFile as error:
            raise InputError(f"the file cannot be read: {error}", where=uri,
                             fix="give a file of documents that `tidewheel data run` reads, such as JSONL, Parquet "
                                 "or text, and name its text with --text") from None
        if not ids:
            problem = "the file has no record"
            if unusable.first:
                problem = (f"none of {sum(unusable.counts.values())} records can be used; line {unusable.first.line}: "
                           f"{unusable.first.reason}, {unusable.first.detail or REASONS[unusable.first.reason]}")
            raise InputError(problem, where=uri, fix="name the field of the text with --text")
        return SignedFile(ids, lines, np.concatenate(signed), dict(sorted(unusable.counts.items())))

    def _tables(self) -> Iterator[pa.Table]:
        """Yield the columns that a search needs, in batches."""
        folder = store(self.uri)
        for file in self._files:
            if not folder.exists(file.key):
                raise InputError("a file of the index is missing", where=folder.at(file.key), fix=_WRITE_AGAIN)
            try:
                for batch in read_batches(folder, file):
                    yield self._columns(pa.Table.from_batches([batch]), folder.at(file.key))
            except StorageError as error:
                raise StorageError(error.what, where=error.where, fix=_WRITE_AGAIN) from None

    def _columns(self, table: pa.Table, where: str) -> pa.Table:
        missing = [name for name in _COLUMNS if name not in table.column_names]
        if missing:
            raise InputError(f"the file of an index has no column {', '.join(missing)}", where=where, fix=_WRITE_AGAIN)
        width = table.schema.field("signature").type
        expected = pa.binary(4 * self.settings.num_permutations)
        if width != expected:
            raise InputError(f"signatures are {width}, but the manifest's parameters make them {expected}",
                             where=where, fix=_WRITE_AGAIN)
        return table.select(list(_COLUMNS))

    def _sketch(self, values: np.ndarray) -> MinHash:
        from datasketch import MinHash

        return MinHash(seed=self.settings.seed, hashvalues=values, permutations=self._permutations, hashfunc=int,
                       scheme="affine32")


_WRITE_AGAIN = "write the index again: `tidewheel data run` with dedup_near: {write_index: true}"


def equal_values(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the number of columns in which each row of `a` equals each row of `b`.

    Values are looked up in sorted columns, so pairs without an equal value cost nothing.

    Args:
        a: uint32 [m, k].
        b: uint32 [n, k].

    Returns:
        int32 [m, n].
    """
    counts = np.zeros((len(a), len(b)), np.int32)
    for index in range(a.shape[1]):
        order = np.argsort(a[:, index], kind="stable")
        column = a[order, index]
        last = np.searchsorted(column, b[:, index], "right")
        repeats = last - np.searchsorted(column, b[:, index], "left")
        columns = np.repeat(np.arange(len(b)), repeats)
        positions = np.arange(len(columns)) + np.repeat(last - np.cumsum(repeats), repeats)
        counts[order[positions], columns] += 1
    return counts


def _settings(parameters: Mapping[str, object], where: str) -> DedupNearStep:
    """Return the settings that the manifest's parameters describe, after checking them."""
    version = parameters.get("signatures")
    if version != MINHASH_VERSION:
        raise InputError(f"the signatures are of version {version!r}, and this release compares {MINHASH_VERSION!r}",
                         where=where, fix=_WRITE_AGAIN)
    missing = sorted(near_index.parameters(build(DedupNearStep, {})).keys() - parameters.keys())
    if missing:
        raise InputError(f"the manifest has no parameter {', '.join(missing)}", where=where, fix=_WRITE_AGAIN)
    values = {name: value for name, value in parameters.items() if name != "signatures"}
    try:
        return build(DedupNearStep, values)
    except ConfigError as error:
        raise InputError(f"the manifest's parameters are invalid for dedup_near: {error.what}", where=where,
                         fix=_WRITE_AGAIN) from None


def _matches(table: pa.Table, rows: np.ndarray, similarities: np.ndarray) -> list[Match]:
    rows_of_table = table.select(["id", "kept"]).take(pa.array(rows))
    return [Match(*values) for values in zip(rows_of_table["id"].to_pylist(), similarities.tolist(),
                                             rows_of_table["kept"].to_pylist(), strict=True)]


def _best(matches: list[Match], limit: int) -> list[Match]:
    return sorted(matches, key=lambda match: (-match.similarity, match.id))[:limit]


def _groups(records: Iterator[Record | Bad], unusable: Unusable) -> Iterator[list[Record]]:
    """Yield usable records in groups, to bound the texts in memory; count the others in `unusable`."""
    group: list[Record] = []
    size = 0
    for record in records:
        if isinstance(record, Bad):
            unusable.add(record)
            continue
        group.append(record)
        size += record.raw_bytes
        if size >= _TEXT_BYTES or len(group) >= _TEXTS:
            yield group
            group = []
            size = 0
    if group:
        yield group
