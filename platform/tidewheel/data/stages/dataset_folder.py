"""Find the files of a data set's split in a folder, in the layouts that Hugging Face's tools write and read.

1. `save_to_disk`: `dataset_dict.json` names the splits, folders with Arrow files that `state.json` lists.
2. `README.md` with `configs` in its YAML head: patterns of files by subset and split.
3. Neither: a word in the name of a folder or file is the split (`data/train-00000-of-00002.parquet`, `test/a.jsonl`).
   If no name has such a word, all files are the split `train`.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import yaml

from tidewheel import yaml_text
from tidewheel.data.compression import unpacked_name
from tidewheel.data.readers.sniff import endings
from tidewheel.errors import InputError
from tidewheel.storage import Store, matches

ALL = "all"
_STATE, _DICT, _CARD = "state.json", "dataset_dict.json", "README.md"
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", _STATE, _DICT)
_DOCUMENTATION = (".md", ".rst")
_WORDS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"),
          "test": ("test", "testing", "eval", "evaluation")}
_SHARD = re.compile(r"(?:^|/)data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*$")
_HEAD = re.compile(r"\A\ufeff?---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_README_BYTES = 4 << 20

Splits = dict[str, list[str]]
"""Files by split."""


def data_files(folder_store: Store, folder: str, *, subset: str | None, split: str) -> list[str]:
    """Return the keys of a split's files, sorted.

    Args:
        folder_store: store that holds the folder.
        folder: key of the folder; "" for the store itself.
        subset: name of the subset; None for the default one.
        split: one name, several joined by "+", or "all".

    Raises:
        InputError: the subset or split does not exist, or the folder has no data. The message lists what exists.
    """
    where = folder_store.at(folder) if folder else folder_store.uri
    start = len(folder) + 1 if folder else 0
    names = [stamp.key[start:] for stamp in folder_store.list(folder)]
    below = _Folder(folder_store, folder, where)
    if _DICT in names or _STATE in names:
        if subset is not None:
            raise InputError("a folder of save_to_disk has no subsets", where=where, fix="leave out read.subset")
        splits = _saved(below, names)
    else:
        described = _described(below, names, subset) if _CARD in names else None
        if described is None and subset is not None:
            raise InputError(f"there is no subset {subset!r}: no {_CARD} here names any", where=where,
                             fix="leave out read.subset")
        splits = described or _by_name(names)
    if not splits:
        known = ", ".join(sorted(_data_endings()))
        raise InputError("no file in this folder belongs to a data set", where=where,
                         fix=f"files end in {known}; or name them with a pattern in read.paths")
    requested = list(splits) if split == ALL else [name.strip() for name in split.split("+")]
    if missing := [name for name in requested if name not in splits]:
        raise InputError(f"there is no split {', '.join(map(repr, missing))}; there are "
                         f"{', '.join(map(repr, sorted(splits)))}", where=where,
                         fix=f"name one of them with read.split, several with +, or read.split: {ALL}")
    if absent := [name for name in requested if not splits[name]]:
        raise InputError(f"{_CARD} describes the split {absent[0]!r}, but all of its files are missing", where=where,
                         fix="download the data set again, with all its files")
    return sorted({posixpath.join(folder, name) for part in requested for name in splits[part]})


class _Folder:
    """A folder of a store."""

    def __init__(self, folder_store: Store, folder: str, where: str) -> None:
        self._place = folder_store
        self._folder = folder
        self.where = where

    def text(self, name: str) -> str:
        data = self._place.read(posixpath.join(self._folder, name), 0, _README_BYTES)
        return data.decode("utf-8", "replace")

    def json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self.text(name))
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise InputError(f"{name} is not a JSON object", where=self.where, fix="save the data set again")
        return value


def _saved(folder: _Folder, names: Sequence[str]) -> Splits:
    """Return the splits of a folder that `save_to_disk` wrote."""
    if _DICT not in names:
        state = folder.json(_STATE)
        own = state.get("_split")
        return {own if isinstance(own, str) else "train": _arrow_files(folder, names, "", state)}
    splits = folder.json(_DICT).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise InputError(f"{_DICT} has no list of splits", where=folder.where, fix="save the data set again")
    return {name: _arrow_files(folder, names, f"{name}/", folder.json(f"{name}/{_STATE}")) for name in splits
            if f"{name}/{_STATE}" in names}


def _arrow_files(folder: _Folder, names: Sequence[str], below: str, state: Mapping[str, Any]) -> list[str]:
    listed = state.get("_data_files")
    files = [file.get("filename") if isinstance(file, dict) else None for file in listed or []]
    missing = [name for name in files if f"{below}{name}" not in names]
    if not isinstance(listed, list) or missing or state.get("_indices_data_files"):
        what = (f"{below}{missing[0]} is missing" if missing else
                "its rows are chosen by indices" if state.get("_indices_data_files") else "it lists no files")
        raise InputError(f"{below}{_STATE}: {what}", where=folder.where,
                         fix="save the data set again (flatten_indices() first), or export it with to_parquet")
    return [f"{below}{name}" for name in files]


def _described(folder: _Folder, names: Sequence[str], subset: str | None) -> Splits | None:
    """Return the splits of a subset that README.md describes; None if it describes none."""
    head = _HEAD.match(folder.text(_CARD))
    try:
        values = yaml_text.load(head[1]) if head else None
    except yaml.YAMLError as error:
        raise InputError(f"the head of {_CARD} is not YAML ({getattr(error, 'problem', None) or error})",
                         where=folder.where, fix="correct it, or name the files with patterns in read.paths") from None
    configs = values.get("configs") if isinstance(values, dict) else None
    if not isinstance(configs, list) or not configs:
        return None
    known = {config.get("config_name", "default"): config for config in configs if isinstance(config, dict)}
    subset_config = _chosen(known, subset, folder.where)
    data_dir = str(subset_config.get("data_dir") or "").strip("/")
    inside = [name for name in names if not data_dir or name.startswith(f"{data_dir}/")]
    if subset_config.get("data_files") is None:
        return _by_name(inside)
    splits: Splits = {}
    for name, patterns in _patterns(subset_config["data_files"], folder.where):
        splits[name] = [file for pattern in patterns for file in names
                        if _matches(file, posixpath.join(data_dir, pattern))]
    return splits


def _chosen(known: Mapping[str, Mapping[str, Any]], subset: str | None, where: str) -> Mapping[str, Any]:
    if subset is None:
        default = [name for name, config in known.items() if config.get("default")]
        subset = next(iter([*default, *(["default"] if "default" in known else []),
                            *(known if len(known) == 1 else [])]), None)
    if subset is None or subset not in known:
        what = "it has several subsets" if subset is None else f"there is no subset {subset!r}"
        raise InputError(f"{what}: {', '.join(map(repr, sorted(map(str, known))))}", where=where,
                         fix="name one of them with read.subset")
    return known[subset]


def _patterns(given: Any, where: str) -> Iterable[tuple[str, list[str]]]:
    """Yield (split, patterns) of `data_files`: a string, a list of strings or of {split, path}, or an object."""
    if isinstance(given, dict):
        given = [{"split": name, "path": path} for name, path in given.items()]
    if isinstance(given, str) or (isinstance(given, list) and all(isinstance(path, str) for path in given)):
        given = [{"split": "train", "path": given}]
    for entry in given if isinstance(given, list) else [{}]:
        values = entry if isinstance(entry, dict) else {}
        path = values.get("path")
        paths = [path] if isinstance(path, str) else path
        if not isinstance(paths, list) or not all(
                isinstance(pattern, str) and "://" not in pattern for pattern in paths):
            raise InputError(f"data_files of {_CARD} have an unknown form", where=where,
                             fix="name the files with patterns in read.paths")
        yield str(values.get("split", "train")), [pattern.removeprefix("./") for pattern in paths]


def _matches(name: str, pattern: str) -> bool:
    return matches(name, f"{pattern}**" if pattern.endswith("/") else pattern)


def _by_name(names: Sequence[str]) -> Splits:
    """Return the splits that the names of folders and files contain."""
    data = [name for name in names if _is_data(name)]
    shards: Splits = {}
    for name in data:
        if match := _SHARD.search(name):
            shards.setdefault(match[1], []).append(name)
    if shards:
        return shards
    for part in (posixpath.dirname, posixpath.basename):
        splits = {split: [name for name in data if _has_word(part(name), words)] for split, words in _WORDS.items()}
        if any(splits.values()):
            return {split: files for split, files in splits.items() if files}
    return {"train": data} if data else {}


def _is_data(name: str) -> bool:
    parts = name.split("/")
    return (unpacked_name(name).endswith(_data_endings()) and parts[-1] not in _NOT_DATA
            and not any(part.startswith((".", "__")) for part in parts))


def _has_word(text: str, words: Sequence[str]) -> bool:
    return re.search(rf"(?:^|[-._ 0-9/])(?:{'|'.join(words)})(?:[-._ 0-9/]|$)", text) is not None


@cache
def _data_endings() -> tuple[str, ...]:
    """Return the endings of data files."""
    known = [ending for several in endings().values() for ending in several]
    return (".json", *(ending for ending in known if ending not in _DOCUMENTATION))
