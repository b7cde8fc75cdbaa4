"""Read-only store of a data set or a model on the Hugging Face hub, through huggingface_hub's file system."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import unquote

from tidewheel.errors import StorageError
from tidewheel.storage import Stamp, Store, Upload, Writer, safe_key
from tidewheel.stores.hub.calls import endpoint, package, tried
from tidewheel.stores.hub.uri import HubUri, parse

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

WRITE_ELSEWHERE = "write to a folder or s3://bucket/prefix, and upload the result with `hf upload`"
_BLOCK_BYTES = 4 << 20


class HubStore(Store):
    """Read-only store of a data set or a model on the hub, or of a folder in one."""

    def __init__(self, uri: str) -> None:
        self.dataset = parse(uri)
        super().__init__(str(self.dataset))

    def open(self, key: str) -> BinaryIO:
        uri = self.at(key)
        stream = tried(lambda: _file_system().open(uri, "rb", block_size=_BLOCK_BYTES), uri)
        return cast(BinaryIO, io.BufferedReader(_File(stream, uri), 1 << 20))

    def list(self, prefix: str = "") -> Sequence[Stamp]:
        return [Stamp(key, file.size, "") for key, file in sorted(self._files(prefix).items())]

    def exists(self, key: str) -> bool:
        try:
            self._file(key)
        except FileNotFoundError:
            return False
        return True

    def size(self, key: str) -> int:
        return int(self._file(key).size)

    def fingerprint(self, key: str) -> str:
        file = self._file(key)
        return f"hub-{file.lfs.sha256 if file.lfs else file.blob_id}"

    def local_path(self, key: str) -> Path | None:
        return None

    def check(self) -> None:
        self.dataset.newest()

    def check_writable(self) -> None:
        raise self._read_only()

    def writer(self, key: str) -> contextlib.AbstractContextManager[Writer]:
        raise self._read_only()

    def create(self, key: str, data: bytes) -> bool:
        raise self._read_only()

    def delete(self, key: str) -> None:
        raise self._read_only()

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        raise self._read_only()

    def abort(self, upload: Upload) -> None:
        raise self._read_only()

    def _read_only(self) -> StorageError:
        return StorageError("the Hugging Face hub is read-only", where=self.uri, fix=WRITE_ELSEWHERE)

    def _file(self, key: str) -> RepoFile:
        files = self._files("")
        if safe_key(key) not in files:
            raise FileNotFoundError(self.at(key))
        return files[key]

    def _files(self, prefix: str) -> dict[str, RepoFile]:
        root = parse(self.at(prefix)) if prefix else self.dataset
        files = _listed(root, endpoint()) if root.is_fixed else _list(root)
        return {f"{prefix}/{name}" if prefix else name: file for name, file in files.items()}


@lru_cache(maxsize=32)
def _listed(root: HubUri, endpoint: str | None) -> dict[str, RepoFile]:
    """Return the cached `_list` of a commit, whose files never change. All threads share the cache."""
    return _list(root)


def _list(root: HubUri) -> dict[str, RepoFile]:
    """Return what the hub knows about each file below a URI, by its relative path."""
    def request() -> list[RepoFile]:
        entries = package().HfApi(endpoint=endpoint()).list_repo_tree(
            root.id, root.path or None, repo_type=root.kind, revision=unquote(root.revision) or None, recursive=True)
        return [entry for entry in entries if hasattr(entry, "blob_id")]  # not the folders

    try:
        files = tried(request, str(root))
    except FileNotFoundError:
        return {}
    start = len(root.path) + 1 if root.path else 0
    return {file.path[start:]: file for file in files}


class _File(io.RawIOBase):
    """File of the hub that tries failed reads again, and raises StorageErrors."""

    def __init__(self, stream: Any, where: str) -> None:
        self._stream, self._where = stream, where

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        return int(self._stream.tell())

    def readinto(self, buffer: Any) -> int:
        position = self._stream.tell()

        def read() -> bytes:
            self._stream.seek(position)  # where a failed try began
            return bytes(self._stream.read(len(buffer)))

        data = tried(read, self._where)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _file_system() -> Any:
    """Return the file system of this thread; huggingface_hub keeps one for each, with its own cache of listings."""
    return package().HfFileSystem(endpoint=endpoint())
