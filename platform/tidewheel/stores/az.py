"""az://container/prefix: Azure Blob Storage, through adlfs (`pip install 'tidewheel[az]'`).

The account is AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or all of it is in
AZURE_STORAGE_CONNECTION_STRING. Without a key, the credentials are those of `az login`, a service principal
(AZURE_CLIENT_ID ...) or the machine's managed identity.

A long object is a list of blocks that is committed at the end. Azure drops blocks that are not committed after a week,
or when another write of the same blob is committed, so `uploads` lists none.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from typing import Any

from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.storage import Store
from tidewheel.stores import Storage, bucket_uri
from tidewheel.stores.objects.requests import Transfer, try_once
from tidewheel.stores.objects.service import Entry, Part, Problem, Service, SilentError
from tidewheel.stores.objects.store import ObjectStore

CONNECT_SECONDS = 5.0
LIST_ENTRIES = 5000
TRANSIENT = (408, 429, 500, 502, 503, 504)
ONCE: dict[str, Any] = {"retry_total": 0, "connection_timeout": CONNECT_SECONDS, "read_timeout": 3600}
"""Options of each request: no retries of the SDK's own, and `Transfer` sets the deadlines."""
ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"


class AzureBlobStorage(Storage):
    """Containers of Azure Blob Storage."""

    def open(self, uri: str) -> Store:
        return AZStore(bucket_uri(uri, "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, or `az login`"))


class AZService(Service):
    """Requests of the Blob service through the client of adlfs."""

    scheme = "az"
    environment = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING",
                   "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET",
                   "AZURE_STORAGE_TENANT_ID", "AZURE_STORAGE_ANON", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET",
                   "AZURE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE")
    begins_by_request = False  # the id is in the names of its blocks, so two writers of a blob do not mix theirs
    uses_md5 = True

    # -- connection ----------------------------------------------------------------------------
    @classmethod
    def endpoint(cls) -> str:
        connection = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
        fields = dict(field.partition("=")[::2] for field in connection.split(";"))
        account = fields.get("BlobEndpoint") or fields.get("AccountName")
        return account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")

    @classmethod
    def connect(cls) -> Any:
        try:
            from adlfs import AzureBlobFileSystem
        except ImportError:
            raise StorageError("the package for Azure Blob Storage is missing", where="az://",
                               fix="pip install 'tidewheel[az]'") from None
        if not any(os.environ.get(name) for name in ACCOUNT):
            raise StorageError("no storage account is named", where="az://",
                               fix="set AZURE_STORAGE_ACCOUNT_NAME, or AZURE_STORAGE_CONNECTION_STRING")
        try:
            return AzureBlobFileSystem(use_listings_cache=False, skip_instance_cache=True)
        except ValueError as error:  # not shown whole: it may hold the connection string
            raise StorageError("the storage account's settings cannot be used", where="az://",
                               fix="correct AZURE_STORAGE_CONNECTION_STRING, or the account's name and key "
                               f"({type(error.__cause__ or error).__name__})") from None

    @classmethod
    async def prepare(cls, client: Any) -> None:
        transport = client.service_client._pipeline._transport
        await transport.open()
        try_once(getattr(transport, "session", None))

    # -- errors --------------------------------------------------------------------------------
    @classmethod
    def errors(cls) -> tuple[type[BaseException], ...]:
        import aiohttp
        from azure.core.exceptions import AzureError

        return OSError, aiohttp.ClientError, AzureError

    def problem(self, error: BaseException) -> Problem:
        import aiohttp
        from azure.core.exceptions import (
            HttpResponseError,
            IncompleteReadError,
            ServiceRequestError,
            ServiceResponseError,
        )

        status, code = _answer(error)
        if status:
            if code in ("InvalidBlockList", "InvalidBlobOrBlock"):
                return Problem.NO_UPLOAD
            if code in ("BlobAlreadyExists", "ConditionNotMet") or status == 412:
                return Problem.EXISTS
            if status == 401 or code == "AuthenticationFailed":
                return Problem.EXPIRED
            named = {404: Problem.MISSING, 416: Problem.BEYOND}
            return Problem.TRANSIENT if status in TRANSIENT else named.get(status, Problem.FINAL)
        cause = getattr(error, "inner_exception", None) or error
        if isinstance(cause, aiohttp.ClientConnectorError):
            return Problem.UNREACHABLE
        lost = (SilentError, ServiceRequestError, ServiceResponseError, IncompleteReadError, aiohttp.ClientError,
                ConnectionError)
        if isinstance(error, lost) or isinstance(cause, lost):
            return Problem.TRANSIENT
        # an answer of the SDK's own without a status: its body broke off
        return Problem.TRANSIENT if type(error) is HttpResponseError else Problem.FINAL

    def was_answered(self, error: BaseException) -> bool:
        return bool(_answer(error)[0])

    def explained(self, error: BaseException, where: str) -> StorageError:
        from azure.core.exceptions import ClientAuthenticationError

        status, code = _answer(error)
        reason = ", ".join([_short(error), *getattr(error, "__notes__", ())])
        if status in (401, 403) or isinstance(error, ClientAuthenticationError):
            return StorageError(f"access refused ({reason})", where=where,
                                fix="set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, renew `az login`, or "
                                "use an identity with the role Storage Blob Data Contributor; check this machine's "
                                "clock, too; `tidewheel doctor --storage URI` tests it")
        if self.problem(error) is Problem.UNREACHABLE:
            return StorageAwayError(f"the object store does not answer ({reason})", where=where,
                                    fix="check AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING, and "
                                    "the network")
        if status == 400 or code == "InvalidResourceName":
            return StorageError(f"the object store refuses the request ({reason})", where=where,
                                fix="a container has 3 to 63 small letters, digits and dashes; check the key, too")
        if isinstance(error, SilentError):
            return StorageAwayError(f"the object store takes requests but does not answer in time ({reason})",
                                    where=where, fix="check the network; a proxy or a firewall can also cause this")
        return StorageAwayError(f"the object store failed ({reason})", where=where,
                                fix="try again; if it persists, check the account")

    def no_bucket(self, where: str) -> StorageError:
        return StorageError(f"there is no bucket {self.bucket!r}", where=where,
                            fix="create the container or correct the URI; AZURE_STORAGE_ACCOUNT_NAME chooses the "
                            "account")

    # -- requests ------------------------------------------------------------------------------
    async def check(self, transfer: Transfer) -> None:
        await self._page(transfer, "", None, 1)

    async def head_bucket(self, transfer: Transfer) -> None:
        await self._page(transfer, "", None, 1)

    async def head(self, transfer: Transfer, name: str) -> Entry:
        entry = _entry(await self._blob(transfer, name).get_blob_properties(**ONCE))
        if entry is None:
            raise FileNotFoundError(name)
        return entry

    async def get(self, transfer: Transfer, name: str, start: int, length: int | None) -> bytes:
        options = dict(ONCE)
        if start or length is not None:
            options["range"] = f"bytes={start}-" if length is None else f"bytes={start}-{start + length - 1}"
        # not download_blob, which retries a broken body by itself
        chunks = await self._blob(transfer, name)._client.blob.download(**options)
        return await transfer.body(chunks)

    async def put(self, transfer: Transfer, name: str, data: bytes, *, create: bool) -> None:
        await self._blob(transfer, name).upload_blob(data, length=len(data), overwrite=not create, **ONCE)

    async def delete(self, transfer: Transfer, name: str) -> None:
        await self._blob(transfer, name).delete_blob(**ONCE)

    async def list_page(self, transfer: Transfer, prefix: str, after: Any) -> tuple[Sequence[Entry], Any]:
        return await self._page(transfer, prefix, after, LIST_ENTRIES)

    async def send_part(self, transfer: Transfer, part: Part) -> Any:
        block = base64.b64encode(f"{part.upload}-{part.number:05d}".encode()).decode()
        await self._blob(transfer, part.name).stage_block(block, part.data, length=len(part.data), **ONCE)
        return block

    async def complete(self, transfer: Transfer, upload: str, name: str, parts: Sequence[Any], md5: bytes) -> None:
        from azure.storage.blob import BlobBlock, ContentSettings

        await self._blob(transfer, name).commit_block_list(
            [BlobBlock(block) for block in parts], **ONCE,
            content_settings=ContentSettings(content_type="application/octet-stream", content_md5=bytearray(md5)))

    async def abort(self, transfer: Transfer, upload: str, name: str) -> None:
        """Do nothing: Azure drops blocks that are not committed."""

    async def _page(self, transfer: Transfer, prefix: str, after: Any, most: int) -> tuple[list[Entry], Any]:
        pages = self._container(transfer).list_blobs(name_starts_with=prefix or None, include=["metadata"],
                                                     results_per_page=most, **ONCE).by_page(after)
        entries = [_entry(blob) async for blob in await anext(pages)]
        return [entry for entry in entries if entry is not None], pages.continuation_token or None

    def _container(self, transfer: Transfer) -> Any:
        return transfer.client.service_client.get_container_client(self.bucket)

    def _blob(self, transfer: Transfer, name: str) -> Any:
        return self._container(transfer).get_blob_client(name)


class AZStore(ObjectStore):
    """A prefix of a container of Azure Blob Storage."""

    service_type = AZService


def _answer(error: BaseException) -> tuple[int, str]:
    """Return status and code of the answer behind an error; 0 and "" when the store did not answer."""
    response = getattr(error, "response", None)
    status = int(getattr(error, "status_code", None) or 0) if response is not None else 0
    code = getattr(error, "error_code", None)
    if response is not None and status and not code:
        code = response.headers.get("x-ms-error-code", "")
    return status, str(getattr(code, "value", code) or "")


def _short(error: BaseException) -> str:
    status, code = _answer(error)
    text = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return f"HTTP {status} {code}: {text}" if status else text


def _entry(blob: Any) -> Entry | None:
    """Return a blob as an entry; None for a folder of an account with a hierarchical namespace."""
    if (blob.metadata or {}).get("hdi_isfolder") == "true":
        return None
    md5 = getattr(blob.content_settings, "content_md5", None)
    tag = bytes(md5).hex() if md5 else str(blob.etag).strip('"')
    return Entry(str(blob.name), int(blob.size or 0), tag, blob.last_modified.timestamp())
