"""Read-only store of data sets on the Hugging Face hub: hf://datasets/owner/name[@revision][/folder].

The store uses huggingface_hub's file system and its settings: HF_ENDPOINT, HF_TOKEN or `hf auth login`,
HF_HUB_OFFLINE. The default revision is the branch `main`. `commit_of` resolves a branch or tag to its present commit.
The files of a commit never change.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.storage import Stamp, Store, Upload, Writer, join, safe_key

SCHEME = "hf://"
WRITE_ELSEWHERE = "write to a folder or s3://bucket/prefix, and upload the result with `hf upload`"
_BLOCK_BYTES = 4 << 20
_TIMEOUT_SECONDS = 20  # for a request about a data set
_COMMIT = re.compile(r"[0-9a-f]{40}")
_URI = re.compile(r"hf://datasets/(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<path>.*))?$", re.IGNORECASE)


@dataclass(frozen=True)
class HubUri:
    """Parts of a hub URI.

    Args:
        id: data set, as "owner/name".
        revision: branch, tag or commit; "" for the default.
        path: folder or file in the data set; "" for all of it.
    """

    id: str
    revision: str
    path: str

    @property
    def repository(self) -> str:
        """URI of the whole data set at this revision."""
        return f"{SCHEME}datasets/{self.id}" + (f"@{self.revision}" if self.revision else "")

    def at(self, revision: str) -> str:
        """Return the URI of the same path at another revision; "" is the default one."""
        return join(HubUri(self.id, revision, "").repository, self.path)


def is_hub(uri: str) -> bool:
    """Return whether a URI is one of the hub."""
    return uri.lower().startswith(SCHEME)


def is_commit(revision: str) -> bool:
    """Return whether a revision is the full name of a commit."""
    return _COMMIT.fullmatch(revision) is not None


def parse(uri: str) -> HubUri:
    """Return the parts of a hub URI.

    Raises:
        StorageError: the URI names no data set.
    """
    match = _URI.match(uri)
    if not match:
        raise StorageError("not the URI of a data set on the Hugging Face hub", where=uri,
                           fix="write hf://datasets/owner/name, followed by @revision and /folder if needed; "
                               "a slash in a revision is %2F")
    return HubUri(match["id"], match["revision"] or "", (match["path"] or "").strip("/"))


def commit_of(dataset: HubUri) -> str:
    """Return the commit that a data set's revision refers to now.

    Raises:
        StorageError: the data set or revision does not exist or may not be read, or the hub does not answer.
    """
    from urllib.parse import unquote

    with _explained(dataset.repository):
        api = _hub().HfApi(endpoint=_endpoint())
        info = api.repo_info(dataset.id, repo_type="dataset", revision=unquote(dataset.revision) or None,
                             timeout=_TIMEOUT_SECONDS)
    return str(info.sha)


class HubStore(Store):
    """Read-only store of a data set on the hub, or of a folder in one."""

    def __init__(self, uri: str) -> None:
        self.dataset = parse(uri)
        super().__init__(join(self.dataset.repository, self.dataset.path))

    def open(self, key: str) -> BinaryIO:
        with _explained(self.at(key)):
            stream = _file_system().open(self.at(key), "rb", block_size=_BLOCK_BYTES)
        return cast(BinaryIO, io.BufferedReader(_Explained(stream, self.at(key)), 1 << 20))

    def list(self, prefix: str = "") -> Sequence[Stamp]:
        return [Stamp(key, info["size"], "") for key, info in sorted(self._files(prefix).items())]

    def exists(self, key: str) -> bool:
        try:
            self._info(key)
        except FileNotFoundError:
            return False
        return True

    def size(self, key: str) -> int:
        return int(self._info(key)["size"])

    def fingerprint(self, key: str) -> str:
        info = self._info(key)
        return f"hub-{info['lfs'].sha256 if info.get('lfs') else info['blob_id']}"

    def local_path(self, key: str) -> Path | None:
        return None

    def check(self) -> None:
        commit_of(self.dataset)

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

    def _info(self, key: str) -> dict[str, Any]:
        files = self._files("")
        if safe_key(key) not in files:
            raise FileNotFoundError(self.at(key))
        return files[key]

    def _files(self, prefix: str) -> dict[str, dict[str, Any]]:
        root = join(self.uri, *([safe_key(prefix)] if prefix else []))
        files = _listed(root, _endpoint()) if is_commit(self.dataset.revision) else _list(root)
        start = root.removeprefix(self.uri).strip("/")
        return {f"{start}/{name}" if start else name: info for name, info in files.items()}


@lru_cache(maxsize=32)
def _listed(root: str, endpoint: str | None) -> dict[str, dict[str, Any]]:
    """Return the cached `_list` of a commit, whose files never change. All threads share the cache."""
    return _list(root)


def _list(root: str) -> dict[str, dict[str, Any]]:
    """Return the file system's information about each file below a URI, by its relative path."""
    with _explained(root):
        files = _file_system().find(root, detail=True, refresh=True)
    start = len(root.removeprefix(SCHEME).rstrip("/")) + 1
    return {name[start:]: info for name, info in files.items()}


class _Explained(io.RawIOBase):
    """File of the hub that raises StorageErrors."""

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
        with _explained(self._where):
            data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise StorageError("the package that reads from the Hugging Face hub is missing", where=SCHEME,
                           fix="pip install 'tidewheel[hub]'") from None
    return huggingface_hub


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _file_system() -> Any:
    """Return the file system of this thread; huggingface_hub keeps one for each, with its own cache of listings."""
    return _hub().HfFileSystem(endpoint=_endpoint())


@lru_cache(maxsize=1)
def _network_errors() -> tuple[type[Exception], ...]:
    """Return the network errors of the HTTP client that this release of huggingface_hub uses."""
    from huggingface_hub.utils import _http

    client = getattr(_http, "httpx2", None) or getattr(_http, "httpx", None) or getattr(_http, "requests", None)
    base = getattr(client, "TransportError", None) or getattr(client, "RequestException", None)
    return (base, OSError) if isinstance(base, type) else (OSError,)


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn the hub's errors into StorageErrors with a fix; the FileNotFoundError of a file stays as it is."""
    errors = _hub().errors
    try:
        yield
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError,
            errors.HFValidationError) as error:
        raise _refused(error, where) from None
    except errors.EntryNotFoundError:
        raise FileNotFoundError(where) from None
    except FileNotFoundError as error:
        if isinstance(cause := error.__cause__, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)):
            raise _refused(cause, where) from None
        raise
    except errors.OfflineModeIsEnabled:
        raise StorageError("HF_HUB_OFFLINE is set, so nothing is read from the Hugging Face hub", where=where,
                           fix="unset it, or download the data set and give its folder as --input") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "?")
        raise StorageAwayError(f"the Hugging Face hub answers with status {status}", where=where,
                               fix="try again later, or log in with HF_TOKEN or `hf auth login`") from None
    except _network_errors() as error:
        server = _endpoint() or "https://huggingface.co"
        raise StorageAwayError(f"{server} cannot be reached ({type(error).__name__})", where=where,
                               fix="check the network, the proxy and HF_ENDPOINT; or download the data set elsewhere "
                                   "(`hf download --repo-type dataset`) and give its folder as --input") from None


def _refused(error: Exception, where: str) -> StorageError:
    errors = _hub().errors
    if isinstance(error, errors.GatedRepoError):
        return StorageError("the data set requires you to accept its terms", where=where,
                            fix="accept them on its page on the hub, and log in with `hf auth login` or HF_TOKEN")
    if isinstance(error, errors.RevisionNotFoundError):
        return StorageError("the data set has no such revision", where=where,
                            fix="correct the branch, tag or commit after @, or omit it for main")
    return StorageError("there is no such data set on the hub, or it is private", where=where,
                        fix="correct the owner and name; for a private one, log in with `hf auth login` or HF_TOKEN")
