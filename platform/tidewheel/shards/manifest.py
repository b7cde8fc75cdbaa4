"""`manifest.json` of a shard set: the list of its content, and its commit. A set exists when its manifest does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from tidewheel.errors import ShardError, StorageError
from tidewheel.storage import Store, content_hash, safe_key

KEY = "manifest.json"
GROWING = "growing.json"
"""Key of the head of a set that is still being written, see `shards.growing`."""
FORMAT = 1
TOKEN_DTYPES = ("uint16", "uint32")
PACKED, PREFERENCES, ROLLOUTS = "packed", "preferences", "rollouts"
KINDS = (PACKED, PREFERENCES, ROLLOUTS)
PARTS, WITH_MISMATCHED = 2, 3
"""Sequences side by side in a row that `shards.pairs` reads: chosen, rejected, and perhaps a mismatched one."""
VOCABULARY_MULTIPLE = 128
"""Default padding of the vocabulary, for tensor cores (Megatron-LM's `make_vocab_size_divisible_by`)."""
REBUILD = "run the pipeline again with the same output and --verify: it rewrites damaged files"

HASH = re.compile(r"blake3-[0-9a-f]{64}")
_NAME = re.compile(r"[0-9a-f]{32}\.arrow")


@dataclass(frozen=True)
class ShardInfo:
    """One shard file."""

    name: str
    """First 32 hex digits of the content hash, and ".arrow"."""
    rows: int
    tokens: int
    """Number of tokens without padding."""
    bytes: int
    hash: str
    """Content hash, as in `storage.Stamp`."""


@dataclass(frozen=True)
class Manifest:
    """The content of a shard set. The order of the shards is that in which `shards.order` numbers their rows."""

    sequence_length: int
    token_dtype: str
    """"uint16" or "uint32"."""
    vocabulary_size: int
    """Padded to a multiple of the tokenizer's "vocabulary_multiple"."""
    tokenizer: dict[str, Any]
    """{"file": key in the set's folder, "hash": content hash, "eos": int, "pad": int} and, if the pipeline wrote them,
    "bos", "format", "vocabulary" (before padding), "vocabulary_multiple" (default 128) and "settings". With the file,
    this is all that encoding and decoding need (`shards.tokenizer.of_manifest`)."""
    recipe_hash: str
    evaluation_sets: tuple[dict[str, Any], ...]
    """The sets that this one was cleaned against, each {"name", "hash", "items"}."""
    documents: int
    shards: tuple[ShardInfo, ...]
    loss_mask: bool = False
    """Whether rows have a loss mask; packed sets only."""
    waves: tuple[int, ...] = ()
    """Number of shards of each wave, if the set is read wave by wave (`shards.growing`); (): one order over the whole
    set."""
    to_come: int = 0
    """Number of waves that the pipeline has yet to write. Unless it is 0, the set is known only in part and `documents`
    is 0. Never in the file."""
    kind: str = PACKED
    """The kind of row: "packed", a sequence of several documents (`format.shard_schema`); "preferences", a pair
    (`format.preference_schema`), where sequence_length is the maximum for each of the two; or "rollouts", a prompt with
    a sampled answer (`format.rollout_schema`)."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The pipeline's settings, for information; {} if not recorded. They are not part of the set's identity."""
    margins: bool = False
    """Whether pairs have the column margin."""
    unpaired: bool = False
    """Whether a row of a preference set has one answer: the other sequence is the prompt alone."""
    step_labels: bool = False
    """Whether a row of an unpaired set has labels of the steps of its answer."""
    chat_template: str = ""
    """Template of conversations and pairs, as JSON text of `data.tokenize.chat.read_template`; "" for plain text. It is
    not part of the set's identity, because the tokens follow from it."""

    @cached_property
    def rows(self) -> int:
        """Number of rows in the set."""
        return sum(shard.rows for shard in self.shards)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in the set, without padding."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def utilisation(self) -> float:
        """Share of tokens that is not padding; 1.0 for an empty set, and for pairs and rollouts, which have none."""
        if not self.rows or self.kind != PACKED:
            return 1.0
        return self.tokens / (self.rows * self.sequence_length)

    @cached_property
    def hash(self) -> str:
        """Content hash of the canonical JSON: the identity of the set."""
        return content_hash(json.dumps(self.identity(), sort_keys=True, separators=(",", ":")).encode())

    def place(self, row: int, where: str) -> tuple[ShardInfo, int]:
        """Return the shard that holds a row, and the row's index in it.

        Args:
            row: index of the row in the whole set.
            where: location for error messages.

        Raises:
            ShardError: there is no such row.
        """
        if not 0 <= row < self.rows:
            raise ShardError(f"there is no row {row}", where=where,
                             fix=f"rows of this set are numbered from 0 to {self.rows - 1}")
        first = 0
        for shard in self.shards:
            if row < first + shard.rows:
                return shard, row - first
            first += shard.rows
        raise AssertionError("the rows of shards add up to those of the set")

    def identity(self) -> dict[str, Any]:
        """Return the JSON values of the fields that identify the set."""
        values = self.canonical()
        values.pop("recipe", None)
        values.pop("chat_template", None)
        return values

    def canonical(self) -> dict[str, Any]:
        """Return the JSON values of all fields."""
        values = asdict(self)
        del values["to_come"]
        # omitted when empty, as before
        for name in ("waves", "recipe", "chat_template", "margins", "unpaired", "step_labels"):
            if not values[name]:
                del values[name]
        values["shards"] = list(values["shards"])
        values["evaluation_sets"] = list(values["evaluation_sets"])
        return {"format": FORMAT, **values}


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Publish a set. Call this last, once all its files are written.

    Raises:
        ShardError: a field is wrong.
    """
    assert not manifest.to_come, "a set is published once it is complete"
    parse_manifest(manifest.canonical(), store.at(KEY))
    store.write_json(KEY, manifest.canonical())


def read_manifest(store: Store) -> Manifest:
    """Return the manifest of the shard set at `store`, having checked every field.

    Raises:
        ShardError: there is none, or it is damaged or hostile.
    """
    where = store.at(KEY)
    try:
        values = store.read_json(KEY)
    except FileNotFoundError:
        if store.exists(GROWING):
            raise ShardError("a pipeline is still writing this set: there is no manifest.json yet", where=where,
                             fix="wait for the pipeline, or let a training wait: data.wait_seconds (for a mixture it "
                                 "cannot). If the pipeline was stopped, run it again") from None
        raise ShardError("no shard set here: no manifest.json", where=where,
                         fix="give the folder that `tidewheel data run` wrote, OUTPUT/shards") from None
    except StorageError as error:
        if "JSON" not in error.what:
            raise
        raise ShardError(error.what, where=where, fix=REBUILD) from None
    return parse_manifest(values, where)


def parse_manifest(values: Any, where: str) -> Manifest:
    """Return the manifest with these JSON values, having checked every field.

    Args:
        values: JSON values.
        where: location for error messages.

    Raises:
        ShardError: a field is missing or wrong.
    """
    fields = Fields(values, where)
    fields.one_of("format", (FORMAT,))
    dtype = fields.one_of("token_dtype", TOKEN_DTYPES)
    vocabulary = fields.number("vocabulary_size", at_least=1, at_most=1 << (16 if dtype == "uint16" else 32))
    length = fields.number("sequence_length", at_least=1, at_most=1 << 31)
    tokenizer = _tokenizer(fields.group("tokenizer"), vocabulary)
    multiple = tokenizer.get("vocabulary_multiple", VOCABULARY_MULTIPLE)
    if vocabulary % multiple:
        fields.wrong("vocabulary_size", f"a multiple of {multiple}")
    kind = fields.one_of("kind", KINDS)
    room = 2 * length if kind == PREFERENCES else length
    shards = parse_shards(fields, room)
    waves = tuple(fields.numbers("waves")) if "waves" in fields.values else ()
    if waves and (sum(waves) != len(shards) or kind == PREFERENCES):
        fields.wrong("waves", f"{len(shards)} shards of packed sequences or rollouts, distributed over waves")
    sets = []
    for group in fields.groups("evaluation_sets"):
        group.text("name"), group.text("hash"), group.number("items")
        sets.append(dict(group.values))
    return Manifest(
        sequence_length=length, token_dtype=dtype, vocabulary_size=vocabulary, tokenizer=tokenizer,
        recipe_hash=fields.text("recipe_hash"), evaluation_sets=tuple(sets), documents=fields.number("documents"),
        shards=shards, loss_mask=fields.one_of("loss_mask", (False, True)), waves=waves, kind=kind,
        recipe=fields.group("recipe").values if "recipe" in fields.values else {},
        chat_template=fields.text("chat_template") if "chat_template" in fields.values else "",
        margins=fields.one_of("margins", (False, True)) if "margins" in fields.values else False,
        unpaired=fields.one_of("unpaired", (False, True)) if "unpaired" in fields.values else False,
        step_labels=fields.one_of("step_labels", (False, True)) if "step_labels" in fields.values else False)


def parse_shards(fields: Fields, room: int) -> tuple[ShardInfo, ...]:
    """Return the list "shards", whose rows hold at most `room` tokens.

    Raises:
        ShardError: a field is missing or wrong.
    """
    shards = tuple(_shard(shard, room) for shard in fields.groups("shards"))
    if len({shard.name for shard in shards}) != len(shards):
        fields.wrong("shards", "without repetition")
    return shards


def _tokenizer(fields: Fields, vocabulary: int) -> dict[str, Any]:
    file = fields.text("file")
    try:
        safe_key(file)
    except StorageError:
        fields.wrong("file", "a path below the set's folder")
    fields.matching("hash", HASH)
    fields.number("eos", at_most=vocabulary - 1)
    fields.number("pad", at_most=vocabulary - 1)
    if "vocabulary_multiple" in fields.values:
        fields.number("vocabulary_multiple", at_least=1, at_most=1 << 16)
    return dict(fields.values)


def _shard(fields: Fields, length: int) -> ShardInfo:
    name, digest = fields.matching("name", _NAME), fields.matching("hash", HASH)
    if name != shard_name(digest):
        fields.wrong("name", "the beginning of the hash")
    rows = fields.number("rows", at_least=1, at_most=1 << 32)
    return ShardInfo(name=name, rows=rows, tokens=fields.number("tokens", at_most=rows * length),
                     bytes=fields.number("bytes", at_least=1), hash=digest)


def shard_name(digest: str) -> str:
    """Return the name of the shard file whose content hash is `digest`."""
    return digest.removeprefix("blake3-")[:32] + ".arrow"


class Fields:
    """A JSON object whose fields are read one by one, each checked for its type.

    Args:
        values: JSON values.
        where: location for error messages.
        path: prefix of field names in error messages.

    Raises:
        ShardError: `values` is not an object.
    """

    def __init__(self, values: Any, where: str, path: str = "") -> None:
        self.where, self.path = where, path
        if not isinstance(values, dict):
            raise ShardError(f"{path or 'the manifest'} is {type(values).__name__}, not a group of values", where=where,
                             fix=REBUILD)
        self.values: dict[str, Any] = values

    def _take(self, key: str, fits: Callable[[Any], bool], what: str) -> Any:
        if key not in self.values:
            raise ShardError(f"{self.path}{key} is missing", where=self.where, fix=REBUILD)
        if not fits(self.values[key]):
            self.wrong(key, what)
        return self.values[key]

    def wrong(self, key: str, what: str) -> None:
        """Raise a ShardError that says that the value of `key` is not `what`."""
        shown = repr(self.values[key])
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise ShardError(f"{self.path}{key} is {shown}, not {what}", where=self.where, fix=REBUILD)

    def text(self, key: str) -> str:
        """Return a text."""
        return self._take(key, lambda value: isinstance(value, str), "text")

    def matching(self, key: str, pattern: re.Pattern[str]) -> str:
        """Return a text that matches a pattern as a whole."""
        return self._take(key, lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None,
                          f"of the form {pattern.pattern}")

    def number(self, key: str, at_least: int = 0, at_most: int = (1 << 63) - 1) -> int:
        """Return a whole number.

        Args:
            key: name of the field.
            at_least: smallest number.
            at_most: largest number.
        """
        return self._take(key, lambda value: type(value) is int and at_least <= value <= at_most,
                          f"a whole number from {at_least} to {at_most}")

    def positive(self, key: str) -> float:
        """Return a finite number above 0."""
        return float(self._take(key, lambda value: type(value) in (int, float) and 0 < value < float("inf"),
                                "a number above 0"))

    def one_of(self, key: str, known: tuple[Any, ...]) -> Any:
        """Return a value that is one of `known`, also in its type."""
        return self._take(key, lambda value: any(type(value) is type(k) and value == k for k in known),
                          f"one of {', '.join(map(repr, known))}")

    def group(self, key: str) -> Fields:
        """Return the fields of an object."""
        return Fields(self._take(key, lambda value: isinstance(value, dict), "a group of values"), self.where,
                       f"{self.path}{key}.")

    def numbers(self, key: str) -> list[int]:
        """Return a list of whole numbers below 2^32."""
        return self._take(key, lambda value: isinstance(value, list | tuple) and all(
            type(item) is int and 0 <= item < 1 << 32 for item in value), "a list of whole numbers")

    def groups(self, key: str) -> list[Fields]:
        """Return the fields of each object of a list."""
        values = self._take(key, lambda value: isinstance(value, list | tuple), "a list")
        return [Fields(value, self.where, f"{self.path}{key}[{i}].") for i, value in enumerate(values)]
