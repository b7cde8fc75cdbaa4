"""The sequences that a run reads, from one shard set or a mixture of several. The position is its whole state."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from tidewheel import storage
from tidewheel.errors import ConfigError, ShardError
from tidewheel.shards import growing
from tidewheel.shards.config import MixtureConfig
from tidewheel.shards.manifest import PARTS, Manifest, read_manifest
from tidewheel.shards.mixture import Mixture, Phase, integer_weights, temperature_weights
from tidewheel.shards.opened import OnDamage, Rows, TeacherRows
from tidewheel.shards.order import Order, hash64
from tidewheel.shards.pairs import open_set
from tidewheel.shards.waves import ONCE, Passes, WaveOrder

LOCATED_AHEAD = 1024
"""Number of positions that a reader locates at once."""
AGREE = ("kind", "sequence_length", "token_dtype", "vocabulary_size", "loss_mask", "margins", "unpaired",
         "step_labels")
"""Fields of the manifest that all domains must share, besides the tokenizer."""


@dataclass(frozen=True)
class Domain:
    """A shard set and its name in the mixture ("" for a single set)."""

    name: str
    uri: str
    manifest: Manifest

    def id(self, shard: int, row: int) -> str:
        """Return the sequence id of a row: "shardname:row", or "domain/shardname:row" in a mixture.

        Args:
            shard: index of the shard.
            row: index of the row in the shard.
        """
        return f"{self.prefix}{self.manifest.shards[shard].name}:{row}"

    @property
    def prefix(self) -> str:
        """The prefix of the domain's sequence ids."""
        return f"{self.name}/" if self.name else ""


class Source:
    """Sequences by global position. It reads no shard; `SourceReader` does.

    Args:
        domains: the sets; a single one unless there is a mixture.
        seed: any integer; only its lowest 64 bits are used.
        mixture: the share of each domain.
        passes: how each wave of a set in waves is read.

    Attributes:
        domains: sorted by name.
        mixture: the share of each domain; None for a single set.
        manifest: that of the first domain; sequence length, vocabulary and tokenizer are the same in all.
        reference: digest of the reference model whose log-probabilities are read with the rows; "": none.
        teacher: digest of the teacher whose tokens are read with the rows; "": none.
    """

    reference: str = ""
    teacher: str = ""

    def __init__(self, domains: Sequence[Domain], seed: int, mixture: Mixture | None = None,
                 passes: Passes = ONCE) -> None:
        self.domains, self.mixture = tuple(domains), mixture
        self.manifest = self.domains[0].manifest
        self._seed, self._passes = seed, passes
        self.orders = [_order(domain.manifest, _domain_seed(seed, domain.name), passes) for domain in self.domains]

    @classmethod
    def single(cls, uri: str, manifest: Manifest, seed: int, passes: Passes = ONCE) -> Source:
        """Return a source of one set, each sequence once per epoch.

        Args:
            uri: the set.
            manifest: its manifest.
            seed: any integer.
            passes: see `Source`.

        Raises:
            ShardError: the set is empty.
        """
        domain = Domain("", uri, manifest)
        _agrees(domain, domain)
        return cls([domain], seed, passes=passes)

    @classmethod
    def mixed(cls, config: MixtureConfig, manifests: dict[str, Manifest], seed: int) -> Source:
        """Return a source of several sets.

        Args:
            config: the mixture.
            manifests: the sets' manifests, by domain.
            seed: any integer.

        Raises:
            ShardError: a set is empty, or was made with another tokenizer, sequence length or type than the others.
            ConfigError: a domain's share is too small.
        """
        names = sorted(config.domains)
        domains = [Domain(name, config.domains[name].shards, manifests[name]) for name in names]
        for domain in domains:
            _agrees(domains[0], domain)
        limit = Fraction(str(config.max_repetitions))
        limits = [int(limit * domain.manifest.rows) if limit else None for domain in domains]
        try:
            return cls(domains, seed, Mixture(_phases(config, domains), limits, seed))
        except ValueError as error:
            raise ConfigError(str(error), where="data.mixture", fix="leave the domain out, or give it more") from None

    def grow(self, manifest: Manifest) -> None:
        """Add the waves of a single set that `manifest` has more than the present one.

        Positions that were known stay the same, so other threads can go on reading. A manifest with fewer waves takes
        the last ones away.
        """
        order, waves = self.orders[0], len(self.manifest.waves)
        if isinstance(order, WaveOrder) and len(manifest.waves) >= waves:
            rows = [shard.rows for shard in manifest.shards[len(self.manifest.shards):]]
            order.grow(rows, manifest.waves[waves:], whole=not manifest.to_come)
        else:
            self.orders = [_order(manifest, self._seed, self._passes)]
        self.domains = (Domain("", self.domains[0].uri, manifest),)
        self.manifest = manifest

    @property
    def reach(self) -> int | None:
        """Positions below this can be located now, while the set grows; None: all positions."""
        return self.orders[0].total if self.manifest.to_come else None

    def visits(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (domain, visit), int64 [B] each; visit v of a domain is in its epoch v // rows.

        Args:
            positions: global positions, int64 [B].

        Raises:
            ValueError: a position is negative or beyond the mixture's end.
        """
        if self.mixture is not None:
            return self.mixture.visits(positions)
        positions = np.asarray(positions, dtype=np.int64)
        return np.zeros_like(positions), positions

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (domain, shard, row), int64 [B] each.

        Args:
            positions: global positions, int64 [B].

        Raises:
            ValueError: a position is negative, beyond the mixture's end, or in a wave that is still to come.
        """
        domains, visits = self.visits(positions)
        shards, rows = np.empty_like(visits), np.empty_like(visits)
        for domain in np.unique(domains).tolist():
            in_domain = domains == domain
            shards[in_domain], rows[in_domain] = self.orders[domain].locate(visits[in_domain])
        return domains, shards, rows

    def ids(self, start: int, count: int) -> list[str]:
        """Return the sequence ids of positions [start, start + count), without reading a shard."""
        return self.ids_at(np.arange(start, start + count, dtype=np.int64))

    def ids_at(self, positions: np.ndarray) -> list[str]:
        """Return the sequence ids of `positions`, int64 [B], without reading a shard."""
        located = self.locate(positions)
        return [self.domains[domain].id(shard, row) for domain, shard, row in zip(*(part.tolist() for part in located))]

    def counts(self, positions: int) -> list[int]:
        """Return the number of visits of each domain in the first `positions` positions."""
        return [positions] if self.mixture is None else self.mixture.counts(positions)

    @property
    def end(self) -> int | None:
        """Number of positions; None: no end."""
        return None if self.mixture is None else self.mixture.end

    @cached_property
    def hash(self) -> str:
        """Identity of the sets and their shares: that of a single set (`growing.identity`), or of the mixture."""
        if self.mixture is None:
            return growing.identity(self.manifest)
        spans = [[span.start, *span.weights] for span in self.mixture.spans]
        values = {"domains": {domain.name: domain.manifest.hash for domain in self.domains}, "spans": spans,
                  "end": self.mixture.end}
        return storage.content_hash(json.dumps(values, sort_keys=True).encode())

    def proportions(self, positions: int) -> list[dict[str, Any]]:
        """Return each domain's part of the first `positions` positions: {"domain", "sequences", "share", "rows",
        "tokens", "epochs"}; rows and tokens are those of the set."""
        return [{"domain": domain.name, "sequences": count, "share": count / max(1, positions),
                 "rows": domain.manifest.rows, "tokens": domain.manifest.tokens,
                 "epochs": count / domain.manifest.rows}
                for domain, count in zip(self.domains, self.counts(positions))]

    def spans(self) -> list[dict[str, Any]]:
        """Return the ranges of constant weights, each {"start", "end", "shares": {domain: its share}}."""
        if self.mixture is None:
            return [{"start": 0, "end": None, "shares": {"": 1.0}}]
        return [{"start": span.start, "end": span.end, "shares": {
            domain.name: weight / sum(span.weights) for domain, weight in zip(self.domains, span.weights)}}
            for span in self.mixture.spans]


class SourceReader:
    """Rows by global position. Safe to use from several threads.

    Args:
        source: the positions.
        cache: local folder for shards of object stores; None: a temporary one.
        verify: see `ShardSet.open`.
        on_damage: see `ShardSet.open`.
        parts: see `shards.pairs.open_set`.
        reference: see `shards.pairs.open_set`.
        teacher: see `shards.pairs.open_set`.
    """

    def __init__(self, source: Source, cache: Path | None = None, *, verify: bool = False,
                 on_damage: OnDamage | None = None, parts: int = PARTS, reference: str = "",
                 teacher: str = "") -> None:
        self.source = source
        self._sets = [open_set(domain.uri, cache, verify=verify, on_damage=on_damage, manifest=domain.manifest,
                               parts=parts, reference=reference, teacher=teacher) for domain in source.domains]
        self._lock = threading.Lock()
        self._last: np.ndarray | None = None  # positions of the last call
        self._stride: np.ndarray | None = None  # difference to the positions of the call before
        self._located: dict[bytes, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def settle(self) -> None:
        """Return once all shards read so far are known to be intact.

        Raises:
            ShardError: one is damaged.
        """
        for opened in self._sets:
            opened.settle()

    def close(self) -> None:
        """Stop hashing in the background."""
        for opened in self._sets:
            opened.close()

    def read(self, positions: np.ndarray) -> Rows:
        """Return the rows at `positions`, int64 [B].

        Raises:
            ShardError: a shard is missing or damaged.
        """
        domains, shards, rows = self._locate(np.ascontiguousarray(positions, dtype=np.int64))
        parts, indices = [], []
        for index in np.unique(domains).tolist():
            in_domain = np.flatnonzero(domains == index)
            domain, opened = self.source.domains[index], self._sets[index]
            opened.follow(domain.manifest)
            part = opened.rows(shards[in_domain], rows[in_domain])
            parts.append(_renamed(part, domain.prefix) if domain.prefix else part)
            indices.append(in_domain)
        return parts[0] if len(parts) == 1 else _merged(parts, np.argsort(np.concatenate(indices)))

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of real tokens of each row at `positions`, int32 [B]. It reads no tokens.

        Args:
            positions: int64 [B].

        Raises:
            ShardError: a shard is missing or damaged.
        """
        return self._of_rows(positions, np.int32, lambda opened, shards, rows: opened.lengths(shards, rows))

    def attention_pairs(self, positions: np.ndarray) -> np.ndarray:
        """Return the pairs of tokens that attention computes in each row at `positions`, int64 [B]; see `lengths`."""
        return self._of_rows(positions, np.int64, lambda opened, shards, rows: opened.attention_pairs(shards, rows))

    def _of_rows(self, positions: np.ndarray, dtype: type, read: Callable[[Any, np.ndarray, np.ndarray], np.ndarray]
                 ) -> np.ndarray:
        """Return a number for each of `positions`; `read` returns those of some shards and rows of an opened set."""
        domains, shards, rows = self.source.locate(np.ascontiguousarray(positions, dtype=np.int64))
        found: np.ndarray = np.empty(len(positions), dtype=dtype)
        for index in np.unique(domains).tolist():
            in_domain = domains == index
            opened = self._sets[index]
            opened.follow(self.source.domains[index].manifest)
            found[in_domain] = read(opened, shards[in_domain], rows[in_domain])
        return found

    def _locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `Source.locate`. Once batches follow each other evenly, also locate those to come: for a thousand
        positions this takes little longer than for ten."""
        with self._lock:
            comparable = self._last is not None and self._last.shape == positions.shape
            stride = positions - self._last if comparable and self._last is not None else None
            even = stride is not None and self._stride is not None and np.array_equal(stride, self._stride)
            self._last, self._stride = positions, stride
            located = self._located.pop(positions.tobytes(), None)
            if located is not None:
                return located
            self._located.clear()
            if stride is None or not even or not positions.size or stride.min() < 0:
                return self.source.locate(positions)
            batches = positions + stride * np.arange(max(1, LOCATED_AHEAD // positions.size))[:, None]
            end = self.source.end if self.source.reach is None else self.source.reach
            if end is not None:
                inside = batches.max(axis=1) < end
                inside[0] = True  # `locate` raises for a position beyond the end
                batches = batches[inside]
            columns = [part.reshape(batches.shape) for part in self.source.locate(batches.ravel())]
            for row in range(1, len(batches)):
                self._located[batches[row].tobytes()] = (columns[0][row], columns[1][row], columns[2][row])
            return columns[0][0], columns[1][0], columns[2][0]


def open_source(uri: str, mixture: MixtureConfig | None, seed: int, *, partly: bool = False,
                passes: Passes = ONCE) -> Source:
    """Open a source, with the manifests as they are now.

    Args:
        uri: a single set; not used with a mixture.
        mixture: several sets.
        seed: any integer.
        partly: accept a single set that a pipeline is still writing, see `shards.growing`.
        passes: of a single set, see `Source`.

    Raises:
        ShardError: a set is missing, damaged, or does not fit the others.
        ConfigError: a domain's share is too small.
    """
    if mixture is None:
        return Source.single(uri, (growing.read_set if partly else read_manifest)(storage.store(uri)), seed, passes)
    manifests = {name: read_manifest(storage.store(domain.shards)) for name, domain in mixture.domains.items()}
    return Source.mixed(mixture, manifests, seed)


def _phases(config: MixtureConfig, domains: Sequence[Domain]) -> list[Phase]:
    names, length = [domain.name for domain in domains], domains[0].manifest.sequence_length
    given = [config.domains[name].weight for name in names]
    own = [weight for weight in given if weight is not None] or temperature_weights(
        [domain.manifest.tokens for domain in domains], config.temperature)
    stated = [Phase(-(-phase.until_tokens // length),
                    integer_weights([phase.weights.get(name, 0) for name in names])) for phase in config.phases]
    return [*stated, Phase(None, integer_weights(own))]


def _agrees(first: Domain, other: Domain) -> None:
    if not other.manifest.rows and not other.manifest.to_come:
        raise ShardError("the shard set is empty", where=other.uri,
                         fix="see the pipeline's summary.json for what was dropped and why")
    for name in AGREE:
        ours, theirs = getattr(first.manifest, name), getattr(other.manifest, name)
        if ours != theirs:
            raise ShardError(f"{name} is {theirs} in domain {other.name}, but {ours} in domain {first.name}",
                             where=other.uri, fix="pack all domains with the same tokenizer and sequence length")
    if first.manifest.tokenizer["hash"] != other.manifest.tokenizer["hash"]:
        raise ShardError(f"domain {other.name} was made with another tokenizer than domain {first.name}",
                         where=other.uri, fix="tokenize all domains with one tokenizer file")


def _order(manifest: Manifest, seed: int, passes: Passes) -> Order | WaveOrder:
    rows = [shard.rows for shard in manifest.shards]
    if not manifest.waves and not manifest.to_come:
        return Order(rows, seed)
    return WaveOrder(rows, manifest.waves, seed, whole=not manifest.to_come, passes=passes)


def _domain_seed(seed: int, name: str) -> int:
    """Return a seed for the domain that does not depend on the other domains."""
    return seed if not name else hash64(seed ^ int.from_bytes(blake3(name.encode()).digest(8), "little"))


def _renamed(rows: Rows, prefix: str) -> Rows:
    return replace(rows, ids=[prefix + name for name in rows.ids])


def _merged(parts: Sequence[Rows], order: np.ndarray) -> Rows:
    """Return the rows of several sets in the order of their positions."""
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    def joined_if_read(name: str) -> np.ndarray | None:
        return None if getattr(parts[0], name) is None else joined(name)

    ids = [name for part in parts for name in part.ids]
    of_teacher = [part.teacher for part in parts if part.teacher is not None]
    teacher = None
    if of_teacher:
        teacher = TeacherRows(np.concatenate([rows.tokens for rows in of_teacher])[order],
                              np.concatenate([rows.log_probabilities for rows in of_teacher])[order])
    return Rows(joined("tokens"), joined("lengths"), joined("segment_ids"), joined("positions"),
                [ids[index] for index in order.tolist()], joined_if_read("loss_mask"), parts[0].parts,
                joined_if_read("reference"), teacher, joined_if_read("margins"), joined_if_read("desirable"),
                joined_if_read("sampled"), joined_if_read("referred"), joined_if_read("advantages"),
                joined_if_read("step_labels"))
