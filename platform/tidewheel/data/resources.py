"""Files that a recipe's filters read beside the documents: block lists, word lists, models.

The recipe names them by path. The driver looks at them once and gives workers references of the form
`<content hash>@<uri>`: the hash goes into unit keys, so that another content is another unit wherever the file lies,
and who reads a reference gets that content or an error.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tidewheel.errors import InputError, StorageError
from tidewheel.storage import Store, content_hash, join, split

PACKAGE = "package:"
_HASH = "blake3-"
_GZIP = b"\x1f\x8b"


def find(paths: Iterable[str], input: str) -> dict[str, str]:
    """The reference of every path, as written in the recipe.

    Raises:
        InputError: a file is not there.
        StorageError: its storage cannot be used.
    """
    found: dict[str, str] = {}
    for path in sorted(set(paths)):
        standalone = "://" in path or path.startswith(("/", "~", PACKAGE))
        uri = path if standalone else join(input, path)
        place, name = _locate(uri)
        try:
            found[path] = f"{place.hash(name)}@{uri if path.startswith(PACKAGE) else place.at(name)}"
        except FileNotFoundError:
            raise InputError("there is no such file", where=place.at(name),
                             mend="correct the recipe; relative paths are below --input") from None
    return found


def read(reference: str) -> bytes:
    """The content of a reference, or of a plain path.

    Raises:
        InputError: the file is not there, or is not what it was when the run began.
    """
    place, name, expected = _open(reference)
    try:
        data = place.read(name)
    except FileNotFoundError:
        raise InputError("there is no such file", where=place.at(name), mend="correct the recipe") from None
    if expected and content_hash(data) != expected:
        raise _changed(place, name)
    return data


@contextlib.contextmanager
def local_path(reference: str) -> Iterator[Path]:
    """The content of a reference as a file of this machine, while the context lasts; raises as `read`."""
    place, name, expected = _open(reference)
    path = place.local_path(name)
    if path is not None and path.is_file():
        if expected and place.hash(name) != expected:
            raise _changed(place, name)
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="tidewheel-") as file:
        file.write(read(reference))
        file.flush()
        yield Path(file.name)


def lines(references: Iterable[str]) -> list[str]:
    """Entries of list files, one a line; blank lines and those that begin with "#" are none. UTF-8, plain or gzip.

    Raises:
        InputError: a file is missing, has changed, or is not text.
    """
    found: list[str] = []
    for reference in references:
        data = read(reference)
        try:
            text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode("utf-8-sig")
        except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
            raise InputError(f"not a list in UTF-8: {str(error)[:200]}", where=reference.partition("@")[2] or reference,
                             mend="give a text file with one entry a line, plain or gzip") from None
        stripped = (line.strip() for line in text.splitlines())
        found += [line for line in stripped if line and not line.startswith("#")]
    return found


def _open(reference: str) -> tuple[Store, str, str]:
    """(store, key, expected hash or "") of a reference or a path."""
    digest, _, uri = reference.partition("@")
    if not digest.startswith(_HASH):
        digest, uri = "", reference
    return *_locate(uri), digest


def _locate(uri: str) -> tuple[Store, str]:
    """Store and key; `package:name/file` is a file of an installed package, which is found but not imported."""
    if not uri.startswith(PACKAGE):
        return split(Path(uri).expanduser() if uri.startswith("~") else uri)
    package, _, name = uri.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"the package {package} is not installed", where=uri,
                         mend="pip install 'tidewheel[classify]', or name a file of your own")
    return split(f"{spec.submodule_search_locations[0]}/{name}")


def _changed(place: Store, name: str) -> StorageError:
    return StorageError("the file is another than when the run began", where=place.at(name),
                        mend="leave the recipe's files as they are while it runs, and run again")
