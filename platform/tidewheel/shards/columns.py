"""Columns beside a shard set: what a model says of its rows, made once and durably.

A folder holds the columns of one model, `FOLDER/<hash of the set>/`: a file for each shard, whose name has the hash of
its content, and `column.json`, which is written last and so commits the column. `shards.references` and
`shards.teachers` read them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tidewheel import storage
from tidewheel.errors import ShardError, StorageError
from tidewheel.shards.manifest import Fields, Manifest
from tidewheel.storage import Stamp, Store
from tidewheel.versions import Version

HEAD = "column.json"
FORMAT = 1
SHOWN = 16
"""Hex digits of a digest that messages and folder names show."""


@dataclass(frozen=True)
class Head:
    """Content of column.json."""

    shards: str
    """Hash of the set (`Manifest.hash`)."""
    reference: str
    """Digest of the model: SHA-256 of its parameters (`checkpoint.digest`)."""
    model: str
    """URI of the checkpoint that it was read from, for information."""
    precision: str
    """Type of the matrix products."""
    version: int
    files: tuple[Stamp, ...]
    """One for each shard, in their order."""
    parts: int = 1
    """Of a reference model: columns chosen, rejected and, with 3, mismatched (`shards.pairs`)."""
    top_k: int = 0
    """Of a teacher: number of most likely tokens."""
    temperature: float = 1.0
    """Of a teacher: by which its logits were divided."""
    vocabulary_size: int = 0
    """Of a teacher: its logits."""


def folder_of(columns: str, manifest: Manifest) -> str:
    """Return the folder of the column of a set.

    Args:
        columns: folder of the columns of one model.
        manifest: the set's manifest.
    """
    return storage.join(columns, manifest.hash.removeprefix("blake3-")[:32])


def write_head(store: Store, head: Head) -> None:
    """Publish a column. Call this last, once all its files are written."""
    store.write_json(HEAD, {"format": FORMAT, **asdict(head)})


def read_head(store: Store) -> Head | None:
    """Return the head of the column in a folder; None if it is not complete.

    Raises:
        ShardError: it is damaged, or of another format.
    """
    where = store.at(HEAD)
    try:
        fields = Fields(store.read_json(HEAD), where)
    except FileNotFoundError:
        return None
    except StorageError as error:
        raise ShardError(error.what, where=where, fix="make the column again, into another folder") from None
    fields.one_of("format", (FORMAT,))
    files = tuple(Stamp(file.text("key"), file.number("bytes"), file.text("hash")) for file in fields.groups("files"))
    of_teacher = {name: fields.number(name) for name in ("top_k", "vocabulary_size") if name in fields.values}
    temperature = fields.positive("temperature") if "temperature" in fields.values else 1.0
    return Head(fields.text("shards"), fields.text("reference"), fields.text("model"), fields.text("precision"),
                fields.number("version"), files, fields.number("parts", at_least=1, at_most=3),
                temperature=temperature, **of_teacher)


def checked_head(store: Store, uri: str, manifest: Manifest, version: Version, what: str, command: str,
                 options: str = "") -> Head:
    """Return the head of a set's column.

    Args:
        store: the column's folder.
        uri: the set.
        manifest: its manifest.
        version: of the column that this release computes.
        what: the column has, for messages.
        command: that makes it, without the set.
        options: of the command.

    Raises:
        ShardError: there is no complete column of this set.
    """
    fix = again(command, uri, options)
    head = read_head(store)
    if head is None:
        raise ShardError(f"no {what} of the set {uri}, or they are not complete", where=store.uri, fix=fix)
    if head.shards != manifest.hash or len(head.files) != len(manifest.shards):
        raise ShardError(f"the {what} are of another set than {uri}", where=store.uri, fix=fix)
    if head.version != version.number:
        raise ShardError(f"the {what} have version {head.version}, this release computes {version.number}",
                         where=store.uri, fix=fix)
    return head


def again(command: str, uri: str, options: str = "") -> str:
    """Return how to make a column, for messages.

    Args:
        command: see `checked_head`, also for the others.
        uri: the set.
        options: of the command.
    """
    return f"make them: {command} --data {uri} --output FOLDER{options}"
