"""Choose the files of a source tree that may be documents, and group them into bundles, one unit each.

A unit for each file would be far too many. A file's bundle follows from its path, so adding or removing a file changes
one bundle only.
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
_SALT = 0xC0DE
"""Makes bundles independent of partitions and of the validation split."""


def readable(store: Store, files: Sequence[Stamp], config: ReadConfig) -> tuple[list[Stamp], Counter[str]]:
    """Choose the files that may be documents, by name and length.

    Args:
        store: root of the tree.
        files: all files of the tree.
        config: settings of `read`.

    Returns:
        The chosen files, and the number of skipped files by reason.
    """
    kept: list[Stamp] = []
    skipped: Counter[str] = Counter()
    root = None if is_remote(store.uri) else Path(store.uri)
    linked: dict[str, bool] = {}
    for file in files:
        reason = "" if root is None else _not_a_file(root, file.key, linked)
        reason = reason or reason_by_name(file.key, file.bytes, config.code)
        if reason:
            skipped[reason] += 1
        else:
            kept.append(file)
    return kept, skipped


def _not_a_file(root: Path, key: str, linked: dict[str, bool]) -> str:
    """Return why a path is not a plain file of this tree, or ""; a link in any folder above it counts."""
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
    """Return the files of each bundle, sorted by key; a bundle may be empty.

    The number of bundles follows from the number and size of the files.
    """
    size = sum(file.bytes for file in files)
    minimum = max(-(-len(files) // BUNDLE_FILES), -(-size // config.unit_bytes), 1)
    count = 1 << (minimum - 1).bit_length()
    groups: list[list[Stamp]] = [[] for _ in range(count)]
    for file in sorted(files, key=lambda file: file.key):
        groups[xxhash.xxh3_64_intdigest(file.key.encode("utf-8", "surrogateescape"), _SALT) % count].append(file)
    return groups
