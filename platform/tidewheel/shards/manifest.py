"""`manifest.json`: what a shard set holds. Written last, it is the commit: without it there is no set."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from tidewheel.errors import ShardError, StorageError
from tidewheel.storage import Store, content_hash, safe_key

MANIFEST_KEY = "manifest.json"
FORMAT = "tidewheel-shards-1"
TOKEN_DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class ShardInfo:
    """One shard file: name (first 32 hex digits of its content hash, ".arrow"), rows, real tokens, bytes, hash."""

    name: str
    rows: int
    tokens: int
    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """A shard set.

    Attributes:
        sequence_length: tokens in a row, padding included.
        token_dtype: "uint16" or "uint32".
        vocabulary_size: rows an embedding needs: the tokenizer's size, padded.
        tokenizer: {"file": key below the set, "hash": content hash, "eos": id, "pad": id}.
        recipe_hash: hash of the pipeline's configuration.
        evaluation_sets: what it was cleaned against: {"name", "hash", "items"} each.
        documents: documents with at least one token in the set.
        shards: the files, in the order that positions count through.
        loss_mask: whether rows carry a loss mask.
    """

    sequence_length: int
    token_dtype: str
    vocabulary_size: int
    tokenizer: dict[str, Any]
    recipe_hash: str
    evaluation_sets: tuple[dict[str, Any], ...]
    documents: int
    shards: tuple[ShardInfo, ...]
    loss_mask: bool = False

    @property
    def rows(self) -> int:
        """Sequences in the set."""
        return sum(shard.rows for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Real tokens in the set, padding excluded."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def utilisation(self) -> float:
        """Share of token places that hold a real token; 0 for an empty set."""
        return self.tokens / (self.rows * self.sequence_length) if self.rows else 0.0

    @property
    def hash(self) -> str:
        """Content hash of the manifest: equal for equal sets."""
        return content_hash(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode())

    def to_json(self) -> dict[str, Any]:
        """JSON values, the form on storage; derived figures are not in it, save in `write_manifest`."""
        return {"format": FORMAT, **asdict(self), "evaluation_sets": list(self.evaluation_sets),
                "shards": [asdict(shard) for shard in self.shards]}


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Publish a shard set whose files are all written."""
    totals = {"rows": manifest.rows, "tokens": manifest.tokens, "utilisation": round(manifest.utilisation, 6)}
    store.write_json(MANIFEST_KEY, {**manifest.to_json(), "totals": totals})


def read_manifest(store: Store) -> Manifest:
    """The manifest of the set at `store`.

    Raises:
        ShardError: there is none, or it is damaged: every field is checked, and names cannot leave the set's folder.
    """
    where = store.at(MANIFEST_KEY)
    try:
        values = store.read_json(MANIFEST_KEY)
    except FileNotFoundError:
        raise ShardError("no manifest.json: there is no shard set here, or its pipeline has not finished",
                         where=store.uri, mend="give the folder a pipeline wrote, OUTPUT/shards, or run the pipeline "
                                               "again: it goes on where it stopped") from None
    except StorageError as error:
        if not error.what.startswith("not valid JSON"):
            raise
        raise _damaged(where, error.what) from None
    try:
        return _parse(values)
    except (KeyError, TypeError, ValueError, StorageError) as error:
        raise _damaged(where, f"{type(error).__name__}: {error}") from None


def _damaged(where: str, why: str) -> ShardError:
    return ShardError(f"the manifest is damaged ({why})", where=where,
                      mend="run the pipeline again with the same output, or restore the file")


def _parse(values: Any) -> Manifest:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"format is {found!r}, expected {FORMAT!r}")
    shards = tuple(_parse_shard(entry) for entry in values["shards"])
    kinds: dict[str, type | tuple[type, ...]] = {
        "sequence_length": int, "vocabulary_size": int, "documents": int, "recipe_hash": str, "tokenizer": dict,
        "loss_mask": bool, "evaluation_sets": list}
    for name, kind in kinds.items():
        if not isinstance(values[name], kind) or (kind is int and (isinstance(values[name], bool) or values[name] < 0)):
            raise ValueError(f"{name} is {values[name]!r}")
    if values["token_dtype"] not in TOKEN_DTYPES:
        raise ValueError(f"token_dtype is {values['token_dtype']!r}, expected one of {TOKEN_DTYPES}")
    if values["sequence_length"] < 1 or values["vocabulary_size"] < 1:
        raise ValueError("sequence_length and vocabulary_size must be positive")
    if "file" in values["tokenizer"]:
        safe_key(values["tokenizer"]["file"])
    known = {field.name for field in fields(Manifest)}
    return Manifest(**{**{name: value for name, value in values.items() if name in known}, "shards": shards,
                       "evaluation_sets": tuple(values["evaluation_sets"])})


def _parse_shard(entry: Any) -> ShardInfo:
    shard = ShardInfo(**entry)
    safe_key(shard.name)
    for name in ("rows", "tokens", "bytes"):
        value = getattr(shard, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} of shard {shard.name!r} is {value!r}")
    if not isinstance(shard.hash, str) or not shard.hash.startswith("blake3-"):
        raise ValueError(f"hash of shard {shard.name!r} is {shard.hash!r}")
    return shard
