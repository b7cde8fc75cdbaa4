"""One interface over local folders and object stores.

A `Store` is a root URI; keys below it are relative paths that cannot climb out. A write is atomic:
readers see the whole object or none. The writer returns its length and hash, computed while the bytes
are written. Nothing is renamed on an object store.
"""

from __future__ import annotations

import re
from pathlib import Path

from tidewheel.errors import StorageError
from tidewheel.storage.base import (
    CHUNK_BYTES,
    HashingWriter,
    Stamp,
    Store,
    Upload,
    Writer,
    content_hash,
    join,
    matches,
    safe_key,
)
from tidewheel.storage.folder import TEMPORARY_PREFIX, LocalStore

__all__ = ["CHUNK_BYTES", "TEMPORARY_PREFIX", "HashingWriter", "LocalStore", "Stamp", "Store", "Upload", "Writer",
           "absolute", "content_hash", "is_remote", "join", "matches", "read_text", "safe_key", "scheme_of", "split",
           "store"]
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)://")
"""The scheme of a URI: a name, or `module:Class`."""
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


def scheme_of(uri: str) -> str:
    """Return the storage scheme of a URI: its name in lower case, or `module:Class`; "" for a local path."""
    match = _SCHEME.match(uri)
    if match is None:
        return ""
    return match[1] if ":" in match[1] else match[1].lower()


def is_remote(uri: str) -> bool:
    """Return True for URIs of storage schemes such as s3://, and False for local paths and file:// URIs."""
    return scheme_of(str(uri)) not in ("", "file")


def absolute(uri: str | Path) -> str:
    """Return `uri` in the form that is valid in every process of a cluster: local paths become absolute."""
    return str(uri) if is_remote(str(uri)) else store(uri).uri


def store(uri: str | Path) -> Store:
    """Return the store rooted at `uri`: a local path, or a URI of a storage scheme such as s3://bucket/prefix.

    Raises:
        StorageError: the scheme is unknown, its package is missing, or the URI is incomplete.
    """
    text = str(uri)
    if scheme_of(text):
        from tidewheel.stores import open_uri  # schemes are parts, which rest on this module

        return open_uri(text)
    if match := _ONE_SLASH.match(text):
        from tidewheel.stores import SCHEMES, URI_FIX

        if match[1].lower() in SCHEMES.names():
            raise StorageError("this URI has only one slash after its scheme", where=text, fix=URI_FIX)
    return LocalStore(text)


def split(uri: str | Path) -> tuple[Store, str]:
    """Return the store of a file's folder, and the file's name.

    Raises:
        StorageError: the URI names a folder.
    """
    folder, _, name = str(uri).rpartition("/")
    if name in ("", ".", "..") or folder.endswith(":/"):
        raise StorageError("this names a folder, not a file", where=str(uri), fix="give the path of a file")
    return store(folder or ("/" if str(uri).startswith("/") else ".")), name


def read_text(uri: str | Path) -> str:
    """Return the file at `uri` as UTF-8 text.

    Raises:
        FileNotFoundError: there is no such file.
    """
    folder, name = split(uri)
    return folder.read(name).decode("utf-8")
