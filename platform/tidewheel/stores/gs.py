"""gs://bucket/prefix: Google Cloud Storage, through gcsfs (`pip install 'tidewheel[gs]'`).

Credentials are Google's application default ones: GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default
login`, or the machine's service account; without any, public buckets can be read. STORAGE_EMULATOR_HOST names another
server, which is then used without credentials.

Requests are those of the JSON API. A long object is a resumable upload; Google forgets one that is not completed after
a week and charges nothing for it, so `uploads` lists none.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.storage import Store
from tidewheel.stores import Storage, bucket_uri
from tidewheel.stores.objects.requests import Transfer, try_once
from tidewheel.stores.objects.service import Entry, Part, Problem, Service, SilentError
from tidewheel.stores.objects.store import ObjectStore

CONNECT_SECONDS = 5.0
CHUNK_BYTES = 1 << 20
FIELDS = "name,size,md5Hash,crc32c,updated"
TRANSIENT = (408, 429, 500, 502, 503, 504)
RESUME_INCOMPLETE = 308
ANSWER_BYTES = 300
"""At most this much of an error's text is shown."""


class GoogleCloudStorage(Storage):
    """Buckets of Google Cloud Storage."""

    def open(self, uri: str) -> Store:
        return GSStore(bucket_uri(uri, "GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login`, or "
                                  "are the machine's service account"))


class AnswerError(OSError):
    """An answer with an error status.

    Args:
        status: of HTTP.
        message: what the store says.
        about: "object", "bucket" or "upload".
    """

    def __init__(self, status: int, message: str, about: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.about = about


class GSService(Service):
    """Requests of the JSON API with gcsfs's session and credentials."""

    scheme = "gs"
    environment = ("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT", "GOOGLE_CLOUD_UNIVERSE_DOMAIN",
                   "GCSFS_DEFAULT_PROJECT")
    files: ClassVar[Mapping[str, str]] = {
        "GOOGLE_APPLICATION_CREDENTIALS": "~/.config/gcloud/application_default_credentials.json",
    }

    # -- connection ----------------------------------------------------------------------------
    @classmethod
    def endpoint(cls) -> str:
        return os.environ.get("STORAGE_EMULATOR_HOST", "")

    @classmethod
    def connect(cls) -> Any:
        try:
            from gcsfs.core import GCSFileSystem
            from google.auth.exceptions import DefaultCredentialsError
        except ImportError:
            raise StorageError("the package for Google Cloud Storage is missing", where="gs://",
                               fix="pip install 'tidewheel[gs]'") from None
        settings = {"use_listings_cache": False, "skip_instance_cache": True}
        if cls.endpoint():
            return GCSFileSystem(token="anon", **settings)
        try:
            return GCSFileSystem(token="google_default", **settings)
        except DefaultCredentialsError:
            return GCSFileSystem(token="anon", **settings)

    @classmethod
    async def prepare(cls, client: Any) -> None:
        try_once(await client._set_session())
        await asyncio.to_thread(client.credentials.maybe_refresh)  # it blocks while it asks for a token

    # -- errors --------------------------------------------------------------------------------
    @classmethod
    def errors(cls) -> tuple[type[BaseException], ...]:
        import aiohttp
        import requests
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        return OSError, aiohttp.ClientError, GoogleAuthError, requests.RequestException, HttpError

    def problem(self, error: BaseException) -> Problem:
        import aiohttp
        import requests
        from gcsfs.retry import HttpError
        from google.auth.exceptions import TransportError

        if isinstance(error, AnswerError):
            if error.about == "upload" and error.status in (404, 410):
                return Problem.NO_UPLOAD
            named = {404: Problem.MISSING, 412: Problem.EXISTS, 416: Problem.BEYOND, 401: Problem.EXPIRED}
            return Problem.TRANSIENT if error.status in TRANSIENT else named.get(error.status, Problem.FINAL)
        if isinstance(error, HttpError):  # of a refreshed token
            return Problem.EXPIRED
        if isinstance(error, aiohttp.ClientConnectorError):
            return Problem.UNREACHABLE
        lost = (SilentError, aiohttp.ClientError, ConnectionError, TransportError, requests.RequestException)
        return Problem.TRANSIENT if isinstance(error, lost) else Problem.FINAL

    def was_answered(self, error: BaseException) -> bool:
        return isinstance(error, AnswerError)

    def explained(self, error: BaseException, where: str) -> StorageError:
        reason = ", ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
        if isinstance(error, AnswerError) and error.status in (401, 403):
            return StorageError(f"access refused ({reason})", where=where,
                                fix="log in with `gcloud auth application-default login`, set "
                                "GOOGLE_APPLICATION_CREDENTIALS, or use a service account that may read and write "
                                "this bucket; `tidewheel doctor --storage URI` tests it")
        match self.problem(error):
            case Problem.EXPIRED:
                return StorageAwayError(f"the credentials have expired ({reason})", where=where,
                                        fix="renew them with `gcloud auth application-default login`: each try reads "
                                        "them again")
            case Problem.UNREACHABLE:
                return StorageAwayError(f"the object store does not answer ({reason})", where=where,
                                        fix="check the network and STORAGE_EMULATOR_HOST")
        if isinstance(error, AnswerError) and error.status == 400:
            return StorageError(f"the object store refuses the request ({reason})", where=where,
                                fix="check the name of the bucket and the key")
        if isinstance(error, SilentError):
            return StorageAwayError(f"the object store takes requests but does not answer in time ({reason})",
                                    where=where, fix="check the network; a proxy or a firewall can also cause this")
        return StorageAwayError(f"the object store failed ({reason})", where=where,
                                fix="try again; if it persists, see status.cloud.google.com")

    def no_bucket(self, where: str) -> StorageError:
        return StorageError(f"there is no bucket {self.bucket!r}", where=where,
                            fix="create the bucket or correct the URI")

    # -- requests ------------------------------------------------------------------------------
    async def check(self, transfer: Transfer) -> None:
        await self._json(transfer, "GET", self._objects(), about="bucket", params={"maxResults": "1"})

    async def head_bucket(self, transfer: Transfer) -> None:
        await self.check(transfer)  # asking for the bucket itself needs a permission that writers often lack

    async def head(self, transfer: Transfer, name: str) -> Entry:
        return _entry(await self._json(transfer, "GET", self._object(name), params={"fields": FIELDS}))

    async def get(self, transfer: Transfer, name: str, start: int, length: int | None) -> bytes:
        headers = {}
        if start or length is not None:
            headers["Range"] = f"bytes={start}-" if length is None else f"bytes={start}-{start + length - 1}"
        async with await self._request(transfer, "GET", self._object(name), params={"alt": "media"},
                                       headers=headers) as answer:
            await _raise_for_status(answer, "object")
            return await transfer.body(answer.content.iter_chunked(CHUNK_BYTES))

    async def put(self, transfer: Transfer, name: str, data: bytes, *, create: bool) -> None:
        condition = {"ifGenerationMatch": "0"} if create else {}
        await self._json(transfer, "POST", self._uploads(), data=data, about="bucket",
                         headers={"Content-Type": "application/octet-stream"},
                         params={"uploadType": "media", "name": name, **condition})

    async def delete(self, transfer: Transfer, name: str) -> None:
        await self._json(transfer, "DELETE", self._object(name))

    async def list_page(self, transfer: Transfer, prefix: str, after: Any) -> tuple[Sequence[Entry], Any]:
        params = {"fields": f"items({FIELDS}),nextPageToken"}
        if prefix:
            params["prefix"] = prefix
        if after:
            params["pageToken"] = after
        page = await self._json(transfer, "GET", self._objects(), about="bucket", params=params)
        return [_entry(item) for item in page.get("items", ())], page.get("nextPageToken") or None

    async def begin(self, transfer: Transfer, name: str) -> str:
        async with await self._request(transfer, "POST", self._uploads(),
                                       params={"uploadType": "resumable", "name": name},
                                       headers={"X-Upload-Content-Type": "application/octet-stream"}) as answer:
            await _raise_for_status(answer, "bucket")
            return str(answer.headers["Location"])

    async def send_part(self, transfer: Transfer, part: Part) -> Any:
        total = str(part.offset + len(part.data)) if part.is_last else "*"
        stored = await self._stored(transfer, part) if transfer.tries > 1 else part.offset
        while stored < part.offset + len(part.data):
            last = part.offset + len(part.data) - 1
            received = await self._resume(transfer, part, part.data[stored - part.offset:],
                                          f"bytes {stored}-{last}/{total}")
            if received <= stored:
                raise AnswerError(503, f"the upload stays at {received} bytes", "upload")
            stored = received

    async def complete(self, transfer: Transfer, upload: str, name: str, parts: Sequence[Any], md5: bytes) -> None:
        """Do nothing: the last part has published the object."""

    async def abort(self, transfer: Transfer, upload: str, name: str) -> None:
        async with await self._request(transfer, "DELETE", upload, headers={"Content-Length": "0"}) as answer:
            if answer.status != 499:  # the status of a cancelled upload
                await _raise_for_status(answer, "upload")

    async def _stored(self, transfer: Transfer, part: Part) -> int:
        """Return the number of bytes that the store has of an upload, after a try whose answer was lost."""
        return await self._resume(transfer, part, b"", "bytes */*")

    async def _resume(self, transfer: Transfer, part: Part, data: bytes, content_range: str) -> int:
        """Send bytes of an upload, and return the number of bytes that the store then has."""
        async with await self._request(transfer, "PUT", part.upload, data=data,
                                       headers={"Content-Range": content_range}) as answer:
            if answer.status == RESUME_INCOMPLETE:
                _, _, last = answer.headers.get("Range", "").rpartition("-")
                return int(last) + 1 if last else 0
            await _raise_for_status(answer, "upload")
            return part.offset + len(part.data)

    # -- HTTP ----------------------------------------------------------------------------------
    def _objects(self) -> str:
        return f"/storage/v1/b/{quote(self.bucket, safe='')}/o"

    def _object(self, name: str) -> str:
        return f"{self._objects()}/{quote(name, safe='')}"

    def _uploads(self) -> str:
        return f"/upload{self._objects()}"

    async def _json(self, transfer: Transfer, method: str, path: str, *, about: str = "object",
                    **options: Any) -> dict[str, Any]:
        """Send a request, and return the JSON object of the answer, {} when it is empty."""
        async with await self._request(transfer, method, path, **options) as answer:
            await _raise_for_status(answer, about)
            content = await answer.read()
        return dict(json.loads(content)) if content else {}

    async def _request(self, transfer: Transfer, method: str, path: str, *, params: Mapping[str, str] | None = None,
                       headers: Mapping[str, str] | None = None, data: bytes | None = None) -> Any:
        import aiohttp
        from yarl import URL

        client = transfer.client
        url = path if "://" in path else f"{client._location}{path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)  # `Transfer` sets the deadlines
        known = URL(url, encoded=True)
        query = client._get_params(dict(params or {})) if params else {}
        return await client.session.request(
            method, known.update_query(query) if query else known, data=data, allow_redirects=False, timeout=timeout,
            headers=client._get_headers({"Accept-Encoding": "identity", **(headers or {})}))


class GSStore(ObjectStore):
    """A prefix of a bucket of Google Cloud Storage."""

    service_type = GSService


async def _raise_for_status(answer: Any, about: str) -> None:
    if answer.status < 300:
        return
    content = await answer.read()
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = content.decode(errors="replace") or str(answer.reason)
    raise AnswerError(answer.status, " ".join(message.split())[:ANSWER_BYTES], about)


def _entry(item: Mapping[str, Any]) -> Entry:
    written = datetime.datetime.fromisoformat(item["updated"]).timestamp() if item.get("updated") else 0.0
    return Entry(str(item["name"]), int(item.get("size", 0)), str(item.get("md5Hash") or item.get("crc32c") or ""),
                 written)
