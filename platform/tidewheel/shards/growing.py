"""A shard set that can be read while a pipeline writes it, wave by wave (`shards.waves`).

`growing.json`, the head, holds what is known before there are rows: the future manifest without its shards, and the
number of waves. `waves/00003.json` is the record of a wave and lists its shards. It is written once these and all
earlier waves exist, and never changes. A record contains its own hash and that of the previous record (the first one:
that of the head), so records of two pipeline runs are never mixed up. `manifest.json` is written last, as for every
set, and replaces all of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tidewheel.errors import OwnershipError, ShardError, StorageError
from tidewheel.shards.manifest import (
    FORMAT,
    GROWING,
    HASH,
    KEY,
    PACKED,
    REBUILD,
    ROLLOUTS,
    Fields,
    Manifest,
    ShardInfo,
    parse_manifest,
    parse_shards,
    read_manifest,
)
from tidewheel.storage import Store, content_hash

FOLDER = "waves"
MOST_WAVES = 1 << 16
"""Limit of the number of waves."""


def wave_key(number: int) -> str:
    """Return the key of the record of wave `number` in the set's folder."""
    return f"{FOLDER}/{number:05d}.json"


def head_of(manifest: Manifest) -> dict[str, Any]:
    """Return the JSON values of a set's head; the same for a part of the set and for the whole."""
    values = manifest.identity()
    del values["shards"], values["documents"]
    return {**values, "waves": len(manifest.waves) + manifest.to_come}


def identity(manifest: Manifest) -> str:
    """Return the hash that identifies a set: the manifest's, or for a set in waves its head's.

    A run checks the hashes of the waves as they come (`Growing.hashes`).
    """
    if not manifest.waves and not manifest.to_come:
        return manifest.hash
    return _hash(head_of(manifest))


@dataclass(frozen=True)
class Growing:
    """A set in waves, as far as it is written."""

    manifest: Manifest
    """Manifest with the shards of the waves so far; `to_come` is 0 when the set is complete."""
    hashes: tuple[str, ...]
    """Hash of the head, then of each wave; each depends on all before it."""
    _names: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    """Index of each shard by its name. The sets that grow out of one share it, so it may have names of later waves."""

    @classmethod
    def of(cls, manifest: Manifest) -> Growing:
        """Return the set of a manifest, with its hashes."""
        hashes = [_hash(head_of(manifest))]
        for shards in _waves(manifest):
            hashes.append(_wave_hash(hashes[-1], shards))
        return cls(manifest, tuple(hashes), {shard.name: index for index, shard in enumerate(manifest.shards)})

    def head(self) -> Growing:
        """Return the set as it was before its first wave."""
        waves = len(self.manifest.waves) + self.manifest.to_come
        return Growing(replace(self.manifest, shards=(), documents=0, waves=(), to_come=waves), self.hashes[:1])

    def records(self, first: int = 0) -> list[dict[str, Any]]:
        """Return the records of the waves from number `first` on, as JSON values."""
        waves = self.manifest.waves
        begin = len(self.manifest.shards) - sum(waves[first:])
        records = []
        for number in range(first, len(waves)):
            shards = self.manifest.shards[begin:begin + waves[number]]
            records.append(_record(number, self.hashes[number], shards))
            begin += waves[number]
        return records

    def record(self, shards: Sequence[ShardInfo]) -> dict[str, Any]:
        """Return the record of the next wave if it has these shards."""
        return _record(len(self.manifest.waves), self.hashes[-1], shards)

    def grown(self, values: Any, where: str) -> Growing:
        """Return the set with the next wave, having checked every field of its record.

        Args:
            values: the record, as JSON values.
            where: location for error messages.

        Raises:
            ShardError: the record is damaged or hostile, or belongs to another set.
        """
        fields, manifest = Fields(values, where), self.manifest
        fields.one_of("format", (FORMAT,))
        if fields.number("number") != len(manifest.waves) or not manifest.to_come:
            fields.wrong("number", f"that of the next wave, {len(manifest.waves)}")
        if fields.matching("before", HASH) != self.hashes[-1]:
            raise ShardError("this wave does not follow those that were read: the set was rewritten with other content",
                             where=where, fix="start a new run, or give the pipeline its old input and recipe")
        shards = parse_shards(fields, manifest.sequence_length)
        if fields.matching("hash", HASH) != _wave_hash(self.hashes[-1], shards):
            fields.wrong("hash", "that of the wave's content")
        if any(self._has(shard.name) for shard in shards):
            fields.wrong("shards", "without repetition of earlier waves'")
        for index, shard in enumerate(shards, start=len(manifest.shards)):
            self._names[shard.name] = index
        return Growing(replace(manifest, shards=(*manifest.shards, *shards), waves=(*manifest.waves, len(shards)),
                               to_come=manifest.to_come - 1), (*self.hashes, values["hash"]), self._names)

    def _has(self, name: str) -> bool:
        shards, index = self.manifest.shards, self._names.get(name)
        return index is not None and index < len(shards) and shards[index].name == name


def read_set(store: Store) -> Manifest:
    """Return the manifest of the set at `store`, or the known part of it while a pipeline is writing the set.

    Raises:
        ShardError: there is neither, or a file is damaged or hostile.
    """
    if store.exists(KEY):
        return read_manifest(store)
    head = _read(store, GROWING)
    if head is None:
        return read_manifest(store)  # it was written meanwhile; otherwise this raises
    return take_in(store, Growing.of(_parse_head(head, store.at(GROWING)))).manifest


def take_in(store: Store, known: Growing) -> Growing:
    """Return the set with the waves written since, read one by one.

    Raises:
        ShardError: a record is damaged or hostile, or belongs to another set.
    """
    while known.manifest.to_come:
        key = wave_key(len(known.manifest.waves))
        values = _read(store, key)
        if values is None:
            break
        known = known.grown(values, store.at(key))
    return known


def begin(store: Store, head: Manifest) -> Growing:
    """Publish the head of a set, after removing records of an earlier one. An earlier manifest stays until replaced.

    Args:
        store: the set's folder; the tokenizer's file is already in it.
        head: manifest without shards and with all waves `to_come`.
    """
    growing = Growing.of(head)
    values = head_of(head)
    _parse_head(values, store.at(GROWING))
    for entry in store.list(FOLDER):
        store.delete(entry.key)
    store.write_json(GROWING, values)
    return growing


def publish(store: Store, known: Growing, shards: Sequence[ShardInfo], *, alone: bool = True) -> Growing:
    """Publish the next wave, whose shards are written, and return the set with it.

    Args:
        store: the set's folder.
        known: the set so far.
        shards: the wave's shards.
        alone: there is no other writer. If False, a wave that another one has written is not replaced.

    Raises:
        OwnershipError: another writer has published this wave, with other shards.
    """
    key, values = wave_key(len(known.manifest.waves)), known.record(shards)
    grown = known.grown(values, store.at(key))
    if alone:
        store.write_json(key, values)
    elif not store.create(key, json.dumps(values).encode()) and store.read_json(key) != values:
        raise OwnershipError("another writer has published this wave with other shards", where=store.at(key),
                             fix="let one driver own the run")
    return grown


def _read(store: Store, key: str) -> Any:
    """Return the JSON values of a file; None when there is no file."""
    try:
        return store.read_json(key)
    except FileNotFoundError:
        return None
    except StorageError as error:
        if "JSON" not in error.what:
            raise
        raise ShardError(error.what, where=store.at(key), fix=REBUILD) from None


def _parse_head(values: Any, where: str) -> Manifest:
    fields = Fields(values, where)
    waves = fields.number("waves", at_least=1, at_most=MOST_WAVES)
    fields.one_of("kind", (PACKED, ROLLOUTS))
    return replace(parse_manifest({**values, "shards": [], "documents": 0, "waves": []}, where), to_come=waves)


def _waves(manifest: Manifest) -> list[tuple[ShardInfo, ...]]:
    bounds = itertools.pairwise([0, *itertools.accumulate(manifest.waves)])
    return [manifest.shards[first:behind] for first, behind in bounds]


def _record(number: int, before: str, shards: Sequence[ShardInfo]) -> dict[str, Any]:
    return {"format": FORMAT, "number": number, "before": before, "hash": _wave_hash(before, shards),
            "shards": [asdict(shard) for shard in shards]}


def _wave_hash(before: str, shards: Sequence[ShardInfo]) -> str:
    return _hash([before, [asdict(shard) for shard in shards]])


def _hash(values: Any) -> str:
    return content_hash(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())
