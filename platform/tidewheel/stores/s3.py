"""s3://bucket/prefix: object stores of the S3 protocol (AWS, MinIO, Ceph, R2, moto), through s3fs.

Endpoint and credentials come from the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), the
files that AWS tools read, or the machine's role.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

from tidewheel.errors import StorageError
from tidewheel.storage import Store
from tidewheel.stores import Storage, bucket_uri
from tidewheel.stores.objects import s3_errors
from tidewheel.stores.objects.requests import Transfer, try_once
from tidewheel.stores.objects.service import Entry, Part, Problem, Service
from tidewheel.stores.objects.store import ObjectStore

ENDPOINT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
CONNECT_SECONDS = 5.0
CONNECTIONS = 64
CHUNK_BYTES = 1 << 20


class S3(Storage):
    """Buckets of the S3 protocol."""

    def open(self, uri: str) -> Store:
        return S3Store(bucket_uri(uri, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or are the machine's role"))


class S3Service(Service):
    """Requests of the S3 protocol through s3fs's client."""

    scheme = "s3"
    environment = (*ENDPOINT, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE",
                   "AWS_REGION", "AWS_DEFAULT_REGION")
    files: ClassVar[Mapping[str, str]] = {
        "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config",
    }
    delete_batch = 1000

    # -- connection ----------------------------------------------------------------------------
    @classmethod
    def endpoint(cls) -> str:
        for name in ENDPOINT:
            if "@" in os.environ.get(name, ""):  # not shown: it would be in the log
                raise StorageError("the endpoint contains a user or a password, which S3 clients do not "
                                   "use", where=name,
                                   fix=f"remove everything up to the @ from {name}, and give the key with "
                                   "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        return next((os.environ[name] for name in ENDPOINT if os.environ.get(name)), "")

    @classmethod
    def connect(cls) -> Any:
        import s3fs

        client = s3fs.S3FileSystem(
            use_listings_cache=False, skip_instance_cache=True,
            config_kwargs={"connect_timeout": CONNECT_SECONDS, "read_timeout": 3600,  # `Transfer` sets the deadlines
                           "max_pool_connections": CONNECTIONS,
                           "retries": {"total_max_attempts": 1, "mode": "standard"}})
        client.retries = 1
        return client

    @classmethod
    async def prepare(cls, client: Any) -> None:
        await client.set_session()
        sessions = getattr(client._s3._endpoint.http_session, "_sessions", None)
        for session in (sessions or {}).values():
            try_once(session)

    # -- errors --------------------------------------------------------------------------------
    @classmethod
    def errors(cls) -> tuple[type[BaseException], ...]:
        return s3_errors.classes()

    def problem(self, error: BaseException) -> Problem:
        return s3_errors.problem(error)

    def was_answered(self, error: BaseException) -> bool:
        return bool(s3_errors.response(error))

    def explained(self, error: BaseException, where: str) -> StorageError:
        return s3_errors.explained(error, where, self.bucket)

    def no_bucket(self, where: str) -> StorageError:
        return StorageError(f"there is no bucket {self.bucket!r}", where=where,
                            fix="create the bucket or correct the URI; AWS_ENDPOINT_URL chooses the server")

    # -- requests ------------------------------------------------------------------------------
    async def check(self, transfer: Transfer) -> None:
        await self._call(transfer, "list_objects_v2", MaxKeys=1)

    async def head_bucket(self, transfer: Transfer) -> None:
        await self._call(transfer, "head_bucket")

    async def head(self, transfer: Transfer, name: str) -> Entry:
        answer = await self._call(transfer, "head_object", Key=name)
        return Entry(name, int(answer["ContentLength"]), str(answer.get("ETag", "")).strip('"'),
                     float(answer["LastModified"].timestamp()))

    async def get(self, transfer: Transfer, name: str, start: int, length: int | None) -> bytes:
        options = {}
        if start or length is not None:
            options["Range"] = f"bytes={start}-" if length is None else f"bytes={start}-{start + length - 1}"
        answer = await self._call(transfer, "get_object", Key=name, **options)
        try:
            return await transfer.body(_chunks(answer["Body"]))
        finally:
            answer["Body"].close()

    async def put(self, transfer: Transfer, name: str, data: bytes, *, create: bool) -> None:
        condition = {"IfNoneMatch": "*"} if create else {}
        await self._call(transfer, "put_object", Key=name, Body=data, **condition)

    async def delete(self, transfer: Transfer, name: str) -> None:
        await self._call(transfer, "delete_object", Key=name)

    async def delete_many(self, transfer: Transfer, names: Sequence[str]) -> Sequence[str]:
        batch = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        answer = await self._call(transfer, "delete_objects", Delete=batch)
        return [str(refused.get("Code")) for refused in answer.get("Errors", ())]

    async def list_page(self, transfer: Transfer, prefix: str, after: Any) -> tuple[Sequence[Entry], Any]:
        options = {"ContinuationToken": after} if after else {}
        page = await self._call(transfer, "list_objects_v2", Prefix=prefix, **options)
        entries = [Entry(entry["Key"], int(entry["Size"])) for entry in page.get("Contents", ())]
        return entries, page.get("NextContinuationToken") if page.get("IsTruncated") else None

    async def begin(self, transfer: Transfer, name: str) -> str:
        return str((await self._call(transfer, "create_multipart_upload", Key=name))["UploadId"])

    async def send_part(self, transfer: Transfer, part: Part) -> Any:
        answer = await self._call(transfer, "upload_part", Key=part.name, UploadId=part.upload, PartNumber=part.number,
                                  Body=part.data)
        return {"PartNumber": part.number, "ETag": answer["ETag"]}

    async def complete(self, transfer: Transfer, upload: str, name: str, parts: Sequence[Any], md5: bytes) -> None:
        await self._call(transfer, "complete_multipart_upload", Key=name, UploadId=upload,
                         MultipartUpload={"Parts": list(parts)})

    async def abort(self, transfer: Transfer, upload: str, name: str) -> None:
        await self._call(transfer, "abort_multipart_upload", Key=name, UploadId=upload)

    async def uploads_page(self, transfer: Transfer, prefix: str,
                           after: Any) -> tuple[Sequence[tuple[Entry, str]], Any]:
        page = await self._call(transfer, "list_multipart_uploads", Prefix=prefix, **(after or {}))
        uploads = [(Entry(upload["Key"], 0, "", upload["Initiated"].timestamp()), str(upload["UploadId"]))
                   for upload in page.get("Uploads", ())]
        if not page.get("IsTruncated"):
            return uploads, None
        return uploads, {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    async def _call(self, transfer: Transfer, method: str, **arguments: Any) -> Any:
        """Send one request of the protocol about the bucket."""
        client = transfer.client
        try:
            return await client._call_s3(method, Bucket=self.bucket, **arguments)
        except OSError as error:
            if s3_errors.code(error) not in s3_errors.MUTE_CODES or not method.startswith("head_"):
                raise
        # the answer to a HEAD has no body that says why: ask in another way, and if that is allowed, as before
        await client._call_s3("list_objects_v2", Bucket=self.bucket, MaxKeys=1)
        return await client._call_s3(method, Bucket=self.bucket, **arguments)


class S3Store(ObjectStore):
    """A prefix of a bucket of the S3 protocol."""

    service_type = S3Service


async def _chunks(body: Any) -> AsyncIterator[bytes]:
    while chunk := await body.read(CHUNK_BYTES):
        yield chunk
