"""The files of a source tree that may be documents, in bundles: a unit for each file would be far too many.

A file's bundle follows from its path, so that a file more or less changes one bundle, not all behind it.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import xxhash

from tidewheel.data.read_config import ReadConfig
from tidewheel.data.readers.code import reason_by_name
from tidewheel.storage import Stamp, Store, is_remote

BUNDLE_FILES = 1024
_SALT = 0xC0DE  # keeps bundles independent of partitions and of the validation split


def readable(place: Store, files: Sequence[Stamp], config: ReadConfig) -> tuple[list[Stamp], Counter[str]]:
    """Return the files that may be documents, by name and length, and how many are left out, by reason."""
    kept, skipped = list[Stamp](), Counter[str]()
    root = None if is_remote(place.uri) else Path(place.uri)
    linked = dict[str, bool]()
    for file in files:
        reason = "" if root is None else _no_file(root, file.key, linked)
        reason = reason or reason_by_name(file.key, file.bytes, config.code)
        if reason:
            skipped[reason] += 1
        else:
            kept.append(file)
    return kept, skipped


def _no_file(root: Path, key: str, linked: dict[str, bool]) -> str:
    """Why a path is no plain file of this tree; a link in any folder above it counts."""
    folder = key.rpartition("/")[0]
    if folder and _is_linked(root, folder, linked):
        return "symbolic_link"
    try:
        mode = os.lstat(root / key).st_mode
    except FileNotFoundError:
        return "no_file"
    return "symbolic_link" if stat.S_ISLNK(mode) else "" if stat.S_ISREG(mode) else "no_file"


def _is_linked(root: Path, folder: str, known: dict[str, bool]) -> bool:
    if folder not in known:
        above = folder.rpartition("/")[0]
        known[folder] = (bool(above) and _is_linked(root, above, known)) or os.path.islink(root / folder)
    return known[folder]


def bundles(files: Sequence[Stamp], config: ReadConfig) -> list[list[Stamp]]:
    """Return the files by bundle, each sorted by key; some may be empty. How many there are follows from the files'
    number and length."""
    size = sum(file.bytes for file in files)
    wanted = max(-(-len(files) // BUNDLE_FILES), -(-size // config.unit_bytes), 1)
    count = 1 << (wanted - 1).bit_length()
    found: list[list[Stamp]] = [[] for _ in range(count)]
    for file in sorted(files, key=lambda file: file.key):
        found[xxhash.xxh3_64_intdigest(file.key.encode("utf-8", "surrogateescape"), _SALT) % count].append(file)
    return found
