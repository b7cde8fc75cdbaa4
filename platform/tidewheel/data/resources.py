"""Files that a recipe's filters read besides the documents: block lists, word lists, models.

The recipe names them by path. The driver hashes them once and passes references of the form `<content hash>@<uri>` to
workers. The hash is part of unit keys, so a changed file makes new units, and a moved one does not. Reading a reference
returns exactly that content or fails.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tidewheel.data.compression import decompress
from tidewheel.errors import InputError, StorageError
from tidewheel.storage import Store, content_hash, join, split

PACKAGE = "package:"
_HASH = "blake3-"


def find(paths: Iterable[str], input: str) -> dict[str, str]:
    """Return the reference of each path, by the path as written in the recipe.

    Raises:
        InputError: a file is missing.
        StorageError: its storage cannot be used.
    """
    references: dict[str, str] = {}
    for path in sorted(set(paths)):
        standalone = "://" in path or path.startswith(("/", "~", PACKAGE))
        uri = path if standalone else join(input, path)
        folder, name = _locate(uri)
        try:
            references[path] = f"{folder.hash(name)}@{uri if path.startswith(PACKAGE) else folder.at(name)}"
        except FileNotFoundError:
            raise InputError("there is no such file", where=folder.at(name),
                             fix="correct the recipe; relative paths are below --input") from None
    return references


def read(reference: str) -> bytes:
    """Return the content of a reference, or of a plain path.

    Raises:
        InputError: the file is missing.
        StorageError: the file has changed since the run began.
    """
    folder, name, expected = _open(reference)
    try:
        data = folder.read(name)
    except FileNotFoundError:
        raise InputError("there is no such file", where=folder.at(name), fix="correct the recipe") from None
    if expected and content_hash(data) != expected:
        raise _changed(folder, name)
    return data


@contextlib.contextmanager
def local_path(reference: str) -> Iterator[Path]:
    """Yield a local file with the content of a reference; it may be temporary.

    Raises:
        InputError: the file is missing.
        StorageError: the file has changed since the run began.
    """
    folder, name, expected = _open(reference)
    path = folder.local_path(name)
    if path is not None and path.is_file():
        if expected and folder.hash(name) != expected:
            raise _changed(folder, name)
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="tidewheel-") as file:
        file.write(read(reference))
        file.flush()
        yield Path(file.name)


def lines(references: Iterable[str]) -> list[str]:
    """Return the entries of list files: one on each line, without blank lines and lines that start with "#".

    The files are UTF-8: plain, gzip or zstd.

    Raises:
        InputError: a file is missing, or is not text.
        StorageError: a file has changed since the run began.
    """
    entries: list[str] = []
    for reference in references:
        data = read(reference)
        where = reference.partition("@")[2] or reference
        try:
            text = decompress(data, where).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"not a list in UTF-8: {str(error)[:200]}", where=where,
                             fix="give a text file with one entry on each line, plain or gzip") from None
        stripped = (line.strip() for line in text.splitlines())
        entries += [line for line in stripped if line and not line.startswith("#")]
    return entries


def _open(reference: str) -> tuple[Store, str, str]:
    """Return (store, key, expected hash or "") of a reference or a path."""
    digest, _, uri = reference.partition("@")
    if not digest.startswith(_HASH):
        digest, uri = "", reference
    return *_locate(uri), digest


def _locate(uri: str) -> tuple[Store, str]:
    """Return (store, key); `package:name/file` is a file of an installed package, which is located without import."""
    if not uri.startswith(PACKAGE):
        return split(Path(uri).expanduser() if uri.startswith("~") else uri)
    package, _, name = uri.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"the package {package} is not installed", where=uri,
                         fix="pip install 'tidewheel[classify]', or name a file of your own")
    return split(f"{spec.submodule_search_locations[0]}/{name}")


def _changed(folder: Store, name: str) -> StorageError:
    return StorageError("the file has changed since the run began", where=folder.at(name),
                        fix="run again, and do not change the recipe's files while it runs")
