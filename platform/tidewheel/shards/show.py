"""Show rows of a shard set as text, by segment, with the tokens that a model learns to predict."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.errors import ShardError
from tidewheel.shards import preferences, rollouts
from tidewheel.shards.lineage import Sources, known_sources, output_of
from tidewheel.shards.manifest import PACKED, PREFERENCES, ROLLOUTS, Manifest, read_manifest
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.tokenizer import Encoder, of_manifest
from tidewheel.shards.trace import find_row, row_id, segments
from tidewheel.storage import Store, store

_NAMED = 20
"""Number of sources that `sources_told` names."""


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a segment that are all learnt or all not, or one control token."""

    text: str
    """The text as it is; escape it before showing it."""
    tokens: int
    learnt: bool
    """Whether a model learns to predict these tokens."""
    special: bool = False
    """Whether the text is the name of a control token."""


@dataclass(frozen=True)
class Segment:
    """A piece of a document; in a pair, the prompt or an answer to it."""

    name: str
    document: str
    source: str | None
    """None when the set stands alone, without its pipeline's output."""
    start: int
    """First token in the row."""
    tokens: int
    document_offset: int
    """Index in the document of the segment's first token."""
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text without control tokens."""
        return "".join(part.text for part in self.parts if not part.special)


@dataclass(frozen=True)
class Row:
    """One row of a set."""

    row: int
    """Index of the row in the whole set."""
    id: str
    length: int
    """Number of tokens without padding."""
    room: int
    """Number of tokens with padding; equal to `length` for pairs."""
    masked: bool
    """Whether the set has a loss mask."""
    segments: tuple[Segment, ...]

    def canonical(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def rows(uri: str, *, first: int = 0, source: str | None = None) -> Iterator[Row]:
    """Yield rows in order.

    Args:
        uri: the set.
        first: index of the first row.
        source: only rows that hold a document of this source; None: all.

    Raises:
        ShardError: there is no set or no such row, it is damaged, or the sources of its documents are not known.
    """
    set_store = store(uri)
    manifest = read_manifest(set_store)
    output = output_of(set_store.uri)
    if source is not None and output is None:
        raise ShardError("the sources of its documents are not known: no pipeline output is beside this set",
                         where=set_store.uri, fix="leave --source out, or give the set inside its pipeline's output")
    sources = None if output is None else Sources(output)
    reader = _READERS[manifest.kind](set_store, manifest, sources)
    if not 0 <= first < manifest.rows:
        raise ShardError(f"there is no row {first}", where=set_store.uri,
                         fix=f"rows of this set are numbered from 0 to {manifest.rows - 1}" if manifest.rows
                              else "the set has no rows")
    for row in reader.of_source(first, source) if source is not None else range(first, manifest.rows):
        yield reader.row(row)


def sources_told(uri: str) -> str:
    """Return a clause that names the sources of a set's documents."""
    output = output_of(store(uri).uri)
    names = known_sources(output) if output is not None else []
    listed = ", ".join(map(repr, names[:_NAMED])) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return f"the pipeline read {listed}" if names else "the pipeline recorded no sources"


class _Reader:
    """The common part of the readers of all kinds of sets."""

    def __init__(self, set_store: Store, manifest: Manifest, sources: Sources | None) -> None:
        self.place, self.manifest, self.sources = set_store, manifest, sources
        self.encoder = of_manifest(set_store, manifest.tokenizer)
        self.special = {token_id: name for name, token_id in self.encoder.special.items()}

    def parts(self, tokens: np.ndarray, learnt: np.ndarray) -> tuple[Part, ...]:
        """Return the tokens divided where the loss mask changes and at control tokens."""
        kinds = [(bool(flag), int(token) if int(token) in self.special else None)
                 for token, flag in zip(tokens, learnt, strict=True)]
        parts: list[Part] = []
        start = 0
        for (flag, special), group in itertools.groupby(kinds):
            count = len(list(group))
            text = self._decoded(self.encoder, tokens[start : start + count]) if special is None else (
                self.special[special] * count)
            parts.append(Part(text, count, flag, special is not None))
            start += count
        return tuple(parts)

    @staticmethod
    def _decoded(encoder: Encoder, tokens: np.ndarray) -> str:
        known = tokens[tokens < encoder.vocabulary_size]
        return encoder.decode(known)

    def source_of(self, document: str) -> str | None:
        return None if self.sources is None else self.sources.of([document]).get(document)

    def row(self, number: int) -> Row:
        """Return a row by its index in the whole set."""
        raise NotImplementedError

    def of_source(self, first: int, source: str) -> Iterator[int]:
        """Yield the rows from `first` on that hold a document of the source."""
        raise NotImplementedError


class _Packed(_Reader):
    """Reads packed sequences."""

    def __init__(self, set_store: Store, manifest: Manifest, sources: Sources | None) -> None:
        super().__init__(set_store, manifest, sources)
        self._set = ShardSet.open(set_store.uri, manifest=manifest)

    def row(self, number: int) -> Row:
        index, inside = find_row(self._set, number)
        shard = self._set.shard(index)
        tokens, length = shard.tokens[inside], int(shard.lengths[inside])
        mask = shard.loss_mask[inside] if shard.loss_mask is not None else np.ones(len(tokens), np.uint8)
        in_row = segments(self._set, index, inside)
        sources = {} if self.sources is None else self.sources.of([segment["document"] for segment in in_row])
        shown = []
        for position, segment in enumerate(in_row):
            span = slice(segment["start"], segment["start"] + segment["tokens"])
            shown.append(Segment(f"segment {position}", segment["document"], sources.get(segment["document"]),
                                 segment["start"], segment["tokens"], segment["document_offset"],
                                 self.parts(tokens[span], mask[span])))
        return Row(number, row_id(self._set, index, inside), length, len(tokens), self.manifest.loss_mask, tuple(shown))

    def of_source(self, first: int, source: str) -> Iterator[int]:
        """Yield the rows from `first` on that hold a document of the source, with one shard's ids in memory."""
        assert self.sources is not None
        begin = 0
        for index, info in enumerate(self.manifest.shards):
            if begin + info.rows > first:
                documents = self._set.shard(index).batch.column("document_ids")
                sources = self.sources.of(pc.unique(documents.values).to_pylist())
                matching = pa.array([name for name, its in sources.items() if its == source], pa.string())
                hits = np.flatnonzero(pc.is_in(documents.values, matching).to_numpy(zero_copy_only=False))
                rows_hit = np.unique(np.searchsorted(documents.offsets.to_numpy(), hits, side="right") - 1)
                yield from (begin + row for row in rows_hit.tolist() if begin + row >= first)
            begin += info.rows


class _Pairs(_Reader):
    """Reads preference pairs."""

    def row(self, number: int) -> Row:
        values = preferences.row_of(self.place, self.manifest, number)
        document, prompt = values["document"], values["prompt_length"]
        source = self.source_of(document)
        shown = []
        for name, tokens, start in (("prompt", values["chosen"][:prompt], 0),
                                    ("chosen", values["chosen"][prompt:], prompt),
                                    ("rejected", values["rejected"][prompt:], prompt)):
            learnt = np.full(len(tokens), name != "prompt")
            shown.append(Segment(name, document, source, start, len(tokens), start,
                                 self.parts(np.asarray(tokens, np.int64), learnt)))
        total = values["chosen_length"] + values["rejected_length"]
        return Row(number, values["id"], total, total, True, tuple(shown))

    def of_source(self, first: int, source: str) -> Iterator[int]:
        """Yield the rows from `first` on whose document is of the source."""
        assert self.sources is not None
        begin = 0
        for info in self.manifest.shards:
            if begin + info.rows > first:
                ids = preferences.read_shard(self.place, info, self.manifest).column("document_id").to_pylist()
                sources = self.sources.of(list(dict.fromkeys(ids)))
                yield from (begin + row for row, name in enumerate(ids) if sources.get(name) == source
                            and begin + row >= first)
            begin += info.rows


class _Rollouts(_Reader):
    """Reads rollouts. Their prompts are no documents of a pipeline, so no row is of a source."""

    def row(self, number: int) -> Row:
        values = rollouts.row_of(self.place, self.manifest, number)
        tokens, prompt = np.asarray(values["tokens"], np.int64), values["prompt_length"]
        shown = []
        for name, start, behind in (("prompt", 0, prompt), ("answer", prompt, len(tokens))):
            learnt = np.full(behind - start, name != "prompt")
            shown.append(Segment(name, values["prompt_id"], None, start, behind - start, start,
                                 self.parts(tokens[start:behind], learnt)))
        return Row(number, values["id"], len(tokens), len(tokens), True, tuple(shown))

    def of_source(self, first: int, source: str) -> Iterator[int]:
        return iter(())


_READERS: dict[str, type[_Reader]] = {PACKED: _Packed, PREFERENCES: _Pairs, ROLLOUTS: _Rollouts}
