"""The data of a task: JSON and JSONL files by split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel import storage
from tidewheel.data.compression import decompress
from tidewheel.errors import InputError
from tidewheel.inference.tasks.config import TaskConfig
from tidewheel.inference.tasks.templates import Document
from tidewheel.storage import content_hash

LOOKS = 'data_files: {test: items.jsonl}'


@dataclass(frozen=True)
class Split:
    """The items of one split.

    Args:
        documents: the items; each has all fields of the split.
        fields: names of the fields, in the order in which they first appear.
        hash: of the files' content.
    """

    documents: Sequence[Document]
    fields: tuple[str, ...]
    hash: str


def read_splits(config: TaskConfig, where: str) -> dict[str, Split]:
    """Read the splits that a task uses.

    Args:
        config: the task.
        where: URI of the task file.

    Raises:
        InputError: a split or a file is missing, a file is not JSON, or a split has no items.
    """
    unknown = sorted(set(config.dataset_kwargs) - {"data_files"})
    files = config.dataset_kwargs.get("data_files")
    if unknown or not files:
        what = f"dataset_kwargs has {', '.join(unknown)}" if unknown else "dataset_kwargs has no data_files"
        raise InputError(f"{what}; only local files can be read", where=where, fix=f"write dataset_kwargs: {{{LOOKS}}}")
    by_split: dict[str, Any] = files if isinstance(files, dict) else {"train": files}
    wanted = [config.split]
    if config.num_fewshot and config.fewshot_config.samples is None:
        wanted.append(config.pool_split)
    splits: dict[str, Split] = {}
    for name in dict.fromkeys(wanted):
        if name not in by_split:
            raise InputError(f"split {name!r} has no file; data_files has {', '.join(map(str, by_split))}",
                             where=where, fix=f"name its file: {LOOKS}")
        paths = by_split[name]
        splits[name] = _split([paths] if isinstance(paths, str) else list(paths), where)
    return splits


def _split(paths: Sequence[Any], where: str) -> Split:
    records: list[dict[str, Any]] = []
    hashes: list[str] = []
    for path in paths:
        uri, data = _content(str(path), where)
        records += _records(uri, data)
        hashes.append(content_hash(data))
    if not records:
        raise InputError("there are no items", where=", ".join(map(str, paths)), fix="put an item in each line")
    fields = tuple(dict.fromkeys(field for record in records for field in record))
    return Split([{field: record.get(field) for field in fields} for record in records], fields,
                 content_hash("\n".join(hashes).encode()))


def _content(path: str, where: str) -> tuple[str, bytes]:
    """Return the URI and the content of a file, seen from the working folder, or else from the task's folder."""
    folder, _ = storage.split(where)
    uris = [path] if storage.is_remote(path) or path.startswith("/") else [path, storage.join(folder.uri, path)]
    for uri in uris:
        parent, name = storage.split(uri)
        try:
            data = parent.read(name)
        except FileNotFoundError:
            continue
        return uri, decompress(data, uri)
    raise InputError("the task's data is missing: there is no such file", where=" or ".join(uris),
                     fix=f"correct dataset_kwargs.data_files in {where}, or make the file")


def _records(uri: str, data: bytes) -> list[dict[str, Any]]:
    text = data.decode("utf-8-sig", errors="replace")
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InputError(f"not JSON ({error})", where=uri, fix="correct the file") from None
        return [_record(value, f"{uri}, item {number}") for number, value in enumerate(values, 1)]
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InputError(f"not JSON ({error})", where=f"{uri}:{number}", fix="write one object in each line"
                             ) from None
        records.append(_record(value, f"{uri}:{number}"))
    return records


def _record(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"an item is an object with fields, this is {type(value).__name__}", where=where,
                         fix='write items such as {"question": "...", "answer": "..."}')
    return value
