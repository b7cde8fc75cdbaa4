"""Find the files that a recipe reads: files that its patterns match, and files of the folders that it names.

A path without *, ? and [ may name a folder: a data set as `datasets` and `huggingface_hub` save it (`dataset_folder`),
or with `format: code` a tree of source files (`code_tree`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tidewheel.data import readers
from tidewheel.data.config import PipelineConfig, ReadConfig
from tidewheel.data.reader import AUTO, reader_of
from tidewheel.data.stages import code_tree, dataset_folder, input_versions
from tidewheel.errors import InputError, StorageError
from tidewheel.storage import Stamp, Store, content_hash, is_remote, store
from tidewheel.stores import versioned

_PARALLEL_LOOKUPS = 16
_WILD = "*?["


@dataclass(frozen=True)
class Member:
    """A file in a bundle of source code; the fields are those of `SourceFile`."""

    key: str
    name: str
    bytes: int
    fingerprint: str


@dataclass(frozen=True)
class SourceFile:
    """An input file, or a bundle of source files.

    Args:
        root: URI of the store that holds the file.
        key: key of the file in the store; "" for a bundle.
        name: name of the file in quarantine and lineage.
        bytes: size of the file.
        fingerprint: identity of its content.
        ranges: ranges in which the file is read (`readers.ranges`); () to read it as a whole.
        shape: format of the file, from its first bytes.
        limit: number of documents to read; None for all.
        members: files of a bundle.
    """

    root: str
    key: str
    name: str
    bytes: int
    fingerprint: str
    ranges: tuple[tuple[int, int], ...] = ()
    shape: readers.Shape = field(default_factory=lambda: readers.Shape(readers.fallback()))
    limit: int | None = None
    members: tuple[Member, ...] = ()


@dataclass(frozen=True)
class Sources:
    """Files that a recipe reads.

    Args:
        files: the files, sorted by name.
        skipped: number of skipped files of source trees, by reason.
    """

    files: tuple[SourceFile, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Match:
    """A file that a pattern matches: its store, its key there, and its name."""

    place: Store
    key: str
    name: str


def source_files(config: PipelineConfig, input: str, output: str, commits: Mapping[str, str]) -> Sources:
    """Return the files that the recipe names.

    Args:
        config: the recipe.
        input: URI that relative paths are resolved against.
        output: URI of the output; files below it are not input.
        commits: versions of data sets, from `input_versions.resolved`.

    Raises:
        StorageError: a folder is missing, or storage fails.
        InputError: a pattern matches nothing, or too many files cannot be read.
    """
    matches: dict[str, _Match] = {}
    for pattern in config.read.paths:
        for file in _of_pattern(pattern, config.read, input, output, commits):
            matches.setdefault(file.place.at(file.key), file)
    if _is_tree(config.read):
        sources = _bundled(list(matches.values()), config.read)
        limit = config.read.limit
        return sources if limit is None else replace(sources, files=limited(sources.files, limit))

    def inspect(file: _Match) -> SourceFile:
        file_store = file.place
        key = file.key
        size = file_store.size(key)
        try:
            shape = readers.shape_of(file_store, key, config.read)
        except readers.UnreadableFile as error:
            shape = readers.Shape(readers.fallback(), problem=str(error),
                                  hint="correct the file, or leave it out of read.paths")
        cut = readers.ranges(file_store, key, size, config.read, shape)
        return SourceFile(file_store.uri, key, file.name, size, file_store.fingerprint(key), tuple(cut), shape)

    with ThreadPoolExecutor(_PARALLEL_LOOKUPS) as pool:
        files = tuple(sorted(pool.map(inspect, matches.values()), key=lambda file: file.name))
    _check_formats(files, config.max_bad_fraction)
    readers.check_installed((file.shape for file in files), config.read)
    return Sources(files if config.read.limit is None else limited(files, config.read.limit))


def _is_tree(read: ReadConfig) -> bool:
    """Return whether the files are a tree that is read in bundles."""
    return read.format != AUTO and reader_of(read.format_name, read).TREE


def _bundled(matches: Sequence[_Match], read: ReadConfig) -> Sources:
    """Group the files of source trees into bundles, separately for each store."""
    files: list[SourceFile] = []
    skipped = Counter[str]()
    for tree in {file.place.uri: file.place for file in matches}.values():
        names = {file.key: file.name for file in matches if file.place.uri == tree.uri}
        prefix = "" if all(names[key] == key for key in names) else f"{min(names.values()).rpartition('/')[0]}: "
        with ThreadPoolExecutor(_PARALLEL_LOOKUPS) as pool:
            stamps = pool.map(lambda key, tree=tree: Stamp(key, tree.size(key), ""), names)
            kept, left_out = code_tree.readable(tree, list(stamps), read)
            identities = dict(zip((file.key for file in kept),
                                  pool.map(lambda file, tree=tree: tree.fingerprint(file.key), kept), strict=True))
        skipped += left_out
        bundles = code_tree.bundles(kept, read)
        for number, bundle in enumerate(bundles, 1):
            members = tuple(Member(file.key, names[file.key], file.bytes, identities[file.key]) for file in bundle)
            if members:
                files.append(SourceFile(
                    tree.uri, "", f"{prefix}source files, bundle {number} of {len(bundles)}",
                    sum(member.bytes for member in members), content_hash(repr(members).encode()),
                    shape=readers.Shape(read.format_name), members=members))
    if not files:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(skipped.items()))
        raise InputError(f"no file of the source tree is read ({reasons})", where=matches[0].place.uri,
                         fix="see read.code: languages, max_bytes, and keep for reasons to ignore")
    return Sources(tuple(sorted(files, key=lambda file: file.name)), dict(sorted(skipped.items())))


def _of_pattern(pattern: str, read: ReadConfig, input: str, output: str, commits: Mapping[str, str]) -> list[_Match]:
    is_relative = not ("://" in pattern or pattern.startswith(("/", "~")))
    pattern = input_versions.at_commit(pattern, commits)
    folder = _folder(pattern, input, is_relative)
    if folder is not None:
        folder_store, prefix = folder
        keys: Sequence[str] = ([stamp.key for stamp in folder_store.list(prefix)] if _is_tree(read) else
                               dataset_folder.data_files(folder_store, prefix, subset=read.subset, split=read.split))
    else:
        folder_store, rest = _locate(pattern, input, is_relative)
        _must_exist(folder_store)
        keys = folder_store.glob(rest)
    keys = [key for key in keys if not f"{folder_store.at(key)}/".startswith(f"{output}/")]
    if not keys:
        raise InputError(f"no file matches {pattern!r}", where=input_versions.as_given(folder_store.uri, commits),
                         fix="correct --input or read.paths; patterns know *, ? and ** for any folders")
    return [_Match(folder_store, key, key if is_relative else input_versions.as_given(folder_store.at(key), commits))
            for key in keys]


def _folder(pattern: str, input: str, is_relative: bool) -> tuple[Store, str] | None:
    """Return (store, key of the folder or "" for all) if a path names a folder, else None."""
    if any(mark in pattern for mark in _WILD):
        return None
    if is_relative:
        input_store = store(input)
        prefix = "/".join(part for part in pattern.split("/") if part not in ("", "."))
        if ".." in prefix.split("/"):
            return None
    elif (named := versioned(pattern)) is not None:
        input_store = store(named.root)
        prefix = named.path
    else:
        input_store, prefix = _locate(pattern.rstrip("/"), input, is_relative)
    _must_exist(input_store)
    if not prefix:
        return input_store, ""
    if not is_remote(input_store.uri):
        return (input_store, prefix) if Path(input_store.uri, prefix).is_dir() else None
    return (input_store, prefix) if not input_store.exists(prefix) and input_store.list(prefix) else None


def limited(files: Sequence[SourceFile], limit: int) -> tuple[SourceFile, ...]:
    """Return the files from which `limit` documents are read.

    The number of documents of a file is proportional to its size, by the largest remainder method.
    """
    total = sum(file.bytes for file in files)
    exact = [limit * file.bytes / total if total else 0.0 for file in files]
    parts = [int(share) for share in exact]
    order = sorted(range(len(files)), key=lambda index: (parts[index] - exact[index], files[index].name))
    for index in order[: limit - sum(parts)]:
        parts[index] += 1
    return tuple(replace(file, ranges=(), limit=part) for file, part in zip(files, parts, strict=True) if part)


def _check_formats(files: Sequence[SourceFile], allowed: float) -> None:
    """Raise InputError if the share of unreadable files exceeds the allowed share of bad records.

    Otherwise unreadable files go to quarantine later.
    """
    unreadable = [file for file in files if file.shape.problem]
    if len(unreadable) <= allowed * len(files):
        return
    first = unreadable[0]
    other_problems = Counter(file.shape.problem for file in unreadable[1:])
    more = "".join(f"; {count} more: {problem}" for problem, count in other_problems.most_common(3))
    raise InputError(f"this is {first.shape.problem}{more} ({len(unreadable)} of {len(files)} files cannot be read)",
                     where=first.name, fix=first.shape.hint)


def _locate(pattern: str, input: str, is_relative: bool) -> tuple[Store, str]:
    """Return (store, pattern below it) of a pattern."""
    if is_relative:
        return store(input), pattern
    parts = pattern.split("/")
    wild = next((index for index, part in enumerate(parts) if any(mark in part for mark in _WILD)), len(parts) - 1)
    wild = min(wild, len(parts) - 1)
    return store("/".join(parts[:wild]) or "/"), "/".join(parts[wild:])


def _must_exist(folder_store: Store) -> None:
    if is_remote(folder_store.uri):
        folder_store.check()
    elif not Path(folder_store.uri).is_dir():
        raise StorageError("there is no such folder", where=folder_store.uri, fix="correct --input or read.paths")
