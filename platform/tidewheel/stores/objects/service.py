"""The interface between `ObjectStore` and one protocol of object stores.

A `Service` sends single requests through an fsspec client. It does not retry: `requests.send` does.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from tidewheel.errors import StorageError

if TYPE_CHECKING:
    from tidewheel.stores.objects.requests import Transfer


class Problem(Enum):
    """What an error of a request calls for."""

    MISSING = "there is no such object or bucket"
    EXISTS = "the object exists, so it was not created"
    BEYOND = "the range begins after the object's end"
    NO_UPLOAD = "there is no such upload: it was completed or aborted"
    UNREACHABLE = "nothing listens there"
    TRANSIENT = "try again"
    EXPIRED = "try again with renewed credentials"
    FINAL = "report it"


class SilentError(TimeoutError):
    """The store took a request and did not answer, or answered too slowly."""


@dataclass(frozen=True)
class Entry:
    """An object as its store describes it.

    Args:
        name: in the bucket.
        bytes: its length.
        tag: changes with the content, and only with the content.
        written: Unix time by the store's clock; of an upload, when it began.
    """

    name: str
    bytes: int
    tag: str = ""
    written: float = 0.0


@dataclass(frozen=True)
class Part:
    """One part of an upload.

    Args:
        upload: what `begin` returned.
        name: of the object.
        number: from 1 on.
        offset: of the part in the object, in bytes.
        data: its content.
        is_last: True for the last part.
    """

    upload: str
    name: str
    number: int
    offset: int
    data: bytes
    is_last: bool


class Service(abc.ABC):
    """The requests of one protocol about one bucket. Names are those of objects in the bucket, without a scheme."""

    scheme: ClassVar[str]
    environment: ClassVar[tuple[str, ...]]
    """Variables that decide endpoint and credentials."""
    files: ClassVar[Mapping[str, str]] = {}
    """Variables that name files with credentials, and the path of each file when the variable is not set."""
    delete_batch: ClassVar[int] = 0
    """Number of objects that `delete_many` takes; 0: the protocol deletes objects one by one."""
    begins_by_request: ClassVar[bool] = True
    """Whether the store names an upload by `begin`. Otherwise the sender makes up a unique id."""
    uses_md5: ClassVar[bool] = False
    """Whether `complete` needs the MD5 of the whole object."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket

    # -- connection ----------------------------------------------------------------------------
    @classmethod
    @abc.abstractmethod
    def endpoint(cls) -> str:
        """Return the address or account that the environment names; "" for the protocol's default."""

    @classmethod
    @abc.abstractmethod
    def connect(cls) -> Any:
        """Return a new fsspec client for the environment.

        Raises:
            StorageError: the package is missing, or the environment is incomplete.
        """

    @classmethod
    @abc.abstractmethod
    async def prepare(cls, client: Any) -> None:
        """Open the client's session and load or refresh its credentials, where that may take time."""

    # -- errors --------------------------------------------------------------------------------
    @classmethod
    @abc.abstractmethod
    def errors(cls) -> tuple[type[BaseException], ...]:
        """Return the classes of errors that requests raise; OSError is one."""

    @abc.abstractmethod
    def problem(self, error: BaseException) -> Problem:
        """Return what an error of a request calls for."""

    @abc.abstractmethod
    def was_answered(self, error: BaseException) -> bool:
        """Return whether the store itself sent this error."""

    @abc.abstractmethod
    def explained(self, error: BaseException, where: str) -> StorageError:
        """Return an error of a request as one with a hint."""

    @abc.abstractmethod
    def no_bucket(self, where: str) -> StorageError:
        """Return the error for a bucket that does not exist."""

    # -- requests ------------------------------------------------------------------------------
    @abc.abstractmethod
    async def check(self, transfer: Transfer) -> None:
        """List at most one object, to see whether the bucket can be used."""

    @abc.abstractmethod
    async def head_bucket(self, transfer: Transfer) -> None:
        """Ask for the bucket; fails with `Problem.MISSING` when there is none."""

    @abc.abstractmethod
    async def head(self, transfer: Transfer, name: str) -> Entry:
        """Describe one object."""

    @abc.abstractmethod
    async def get(self, transfer: Transfer, name: str, start: int, length: int | None) -> bytes:
        """Return bytes [start, start + length) of an object, or all from `start` on."""

    @abc.abstractmethod
    async def put(self, transfer: Transfer, name: str, data: bytes, *, create: bool) -> None:
        """Write an object; with `create`, fail with `Problem.EXISTS` when there is one."""

    @abc.abstractmethod
    async def delete(self, transfer: Transfer, name: str) -> None:
        """Delete an object; a missing one is no error, or fails with `Problem.MISSING`."""

    async def delete_many(self, transfer: Transfer, names: Sequence[str]) -> Sequence[str]:
        """Delete up to `delete_batch` objects; return a code for each object that the store refused to delete."""
        raise NotImplementedError

    @abc.abstractmethod
    async def list_page(self, transfer: Transfer, prefix: str, after: Any) -> tuple[Sequence[Entry], Any]:
        """Return one page of the objects whose names begin with `prefix`, and the next page's `after`, None at the end.

        Args:
            transfer: the try.
            prefix: "" for all objects.
            after: None for the first page.
        """

    async def begin(self, transfer: Transfer, name: str) -> str:
        """Begin an upload in parts, and return its id."""
        raise NotImplementedError

    @abc.abstractmethod
    async def send_part(self, transfer: Transfer, part: Part) -> Any:
        """Send one part, and return what `complete` needs of it."""

    @abc.abstractmethod
    async def complete(self, transfer: Transfer, upload: str, name: str, parts: Sequence[Any], md5: bytes) -> None:
        """Publish an upload. The object appears whole."""

    @abc.abstractmethod
    async def abort(self, transfer: Transfer, upload: str, name: str) -> None:
        """Give up an upload."""

    async def uploads_page(self, transfer: Transfer, prefix: str,
                           after: Any) -> tuple[Sequence[tuple[Entry, str]], Any]:
        """Return one page of unfinished uploads with their ids, as `list_page` does."""
        return [], None
