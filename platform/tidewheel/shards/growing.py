"""A shard set that can be read while a pipeline writes it, wave by wave (`shards.waves`).

`growing.json` says what is known before there are rows: what the manifest will say but for the shards, and the number
of waves. `waves/00003.json` lists the shards of a wave; it is written when they and all waves before are there, and
never changed. A record has its own hash in it and that of the record before, the first one that of the head: so
records of two runs of a pipeline never pass for one set. `manifest.json`, written last as for every set, says the
same in one file, and where it is, nothing else is looked at.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidewheel.errors import ShardError, StorageError
from tidewheel.shards.manifest import (
    FORMAT,
    GROWING,
    HASH,
    KEY,
    PACKED,
    REBUILD,
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


def wave_key(number: int) -> str:
    """Where the record of wave `number` is, below the set."""
    return f"{FOLDER}/{number:05d}.json"


def head_of(manifest: Manifest) -> dict[str, Any]:
    """JSON values of what is known of a set in waves before it has rows; the same from a part of it and the whole."""
    values = manifest.identity()
    del values["shards"], values["documents"]
    return {**values, "waves": len(manifest.waves) + manifest.to_come}


def identity(manifest: Manifest) -> str:
    """What tells a set from others: the manifest's hash; of a set in waves that of its head, which is known from the
    start. A run checks the waves' own hashes when they come (`Growing.hashes`)."""
    if not manifest.waves and not manifest.to_come:
        return manifest.hash
    return _hash(head_of(manifest))


@dataclass(frozen=True)
class Growing:
    """A set in waves as far as it is known."""

    manifest: Manifest
    """With the shards of those waves; `to_come` is 0 when they are all."""
    hashes: tuple[str, ...]
    """Of the head, then of each wave: the last one stands for all before it."""

    @classmethod
    def of(cls, manifest: Manifest) -> Growing:
        """The same with the hashes."""
        hashes = [_hash(head_of(manifest))]
        for shards in _waves(manifest):
            hashes.append(_wave_hash(hashes[-1], shards))
        return cls(manifest, tuple(hashes))

    def head(self) -> Growing:
        """The set as it was before its first wave."""
        waves = len(self.manifest.waves) + self.manifest.to_come
        return Growing(replace(self.manifest, shards=(), documents=0, waves=(), to_come=waves), self.hashes[:1])

    def records(self, first: int = 0) -> list[dict[str, Any]]:
        """The records of the waves from number `first` on, as JSON values."""
        return [_record(number, self.hashes[number], shards)
                for number, shards in enumerate(_waves(self.manifest)) if number >= first]

    def record(self, shards: Sequence[ShardInfo]) -> dict[str, Any]:
        """The record of the next wave, if it has these shards."""
        return _record(len(self.manifest.waves), self.hashes[-1], shards)

    def grown(self, values: Any, where: str) -> Growing:
        """With the next wave, whose record these values are, every field checked.

        Raises:
            ShardError: they are damaged or hostile, or the record of another set's wave; names `where`.
        """
        fields, manifest = Fields(values, where), self.manifest
        fields.one_of("format", (FORMAT,))
        if fields.number("number") != len(manifest.waves) or not manifest.to_come:
            fields.wrong("number", f"that of the next wave, {len(manifest.waves)}")
        if fields.matching("before", HASH) != self.hashes[-1]:
            raise ShardError("this wave does not follow those that were read: the set was made anew with other content",
                             where=where, mend="start a new run, or give the pipeline its old input and recipe")
        shards = parse_shards(fields, manifest.sequence_length)
        if fields.matching("hash", HASH) != _wave_hash(self.hashes[-1], shards):
            fields.wrong("hash", "that of the wave's content")
        known = {shard.name for shard in manifest.shards}
        if not known.isdisjoint(shard.name for shard in shards):
            fields.wrong("shards", "without repetition of earlier waves'")
        return Growing(replace(manifest, shards=(*manifest.shards, *shards), waves=(*manifest.waves, len(shards)),
                               to_come=manifest.to_come - 1), (*self.hashes, values["hash"]))


def read_set(store: Store) -> Manifest:
    """The set at `store` as far as it is there: its manifest, or what is known of one that a pipeline is writing.

    Raises:
        ShardError: there is neither, or something is damaged or hostile.
    """
    if store.exists(KEY):
        return read_manifest(store)
    head = _read(store, GROWING)
    if head is None:
        return read_manifest(store)  # it came meanwhile, or says that there is none
    return take_in(store, Growing.of(_parse_head(head, store.at(GROWING)))).manifest


def take_in(store: Store, known: Growing) -> Growing:
    """With the waves that have come since, found one by one under the key of the next; ShardError as `Growing.grown`.
    """
    while known.manifest.to_come:
        key = wave_key(len(known.manifest.waves))
        values = _read(store, key)
        if values is None:
            break
        known = known.grown(values, store.at(key))
    return known


def begin(store: Store, head: Manifest) -> Growing:
    """Publish the head of a set, after removing records of an earlier one; a manifest stays as long as it is not
    replaced. The tokenizer's file must be there.

    Args:
        head: without shards, with all waves `to_come`.
    """
    growing = Growing.of(head)
    values = head_of(head)
    _parse_head(values, store.at(GROWING))
    for found in store.list(FOLDER):
        store.delete(found.key)
    store.write_json(GROWING, values)
    return growing


def publish(store: Store, known: Growing, shards: Sequence[ShardInfo]) -> Growing:
    """Publish the next wave, when its shards are in place; the set with it."""
    key, values = wave_key(len(known.manifest.waves)), known.record(shards)
    grown = known.grown(values, store.at(key))
    store.write_json(key, values)
    return grown


def _read(store: Store, key: str) -> Any:
    """JSON values, None when there are none."""
    try:
        return store.read_json(key)
    except FileNotFoundError:
        return None
    except StorageError as error:
        if "JSON" not in error.what:
            raise
        raise ShardError(error.what, where=store.at(key), mend=REBUILD) from None


def _parse_head(values: Any, where: str) -> Manifest:
    fields = Fields(values, where)
    waves = fields.number("waves", at_least=1, at_most=MOST_WAVES)
    fields.one_of("kind", (PACKED,))
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
