"""Storage schemes: what URIs of the form scheme://... refer to. Each built-in one is a module named by its scheme.

    class Vault(tw.Storage):
        def open(self, uri: str) -> tw.Store:
            return VaultStore(uri)

A class of the user's own is named in the URI, as `my_module:Vault://bucket/prefix`. An installed package's entry point
in the group `tidewheel.storage` gives it a scheme of its own: `vault://bucket/prefix`.
"""

from __future__ import annotations

from typing import Protocol

from tidewheel.errors import ConfigError, StorageError
from tidewheel.parts import Kind, Part
from tidewheel.storage import Store, scheme_of

URI_FIX = "use a local path, or the URI of a storage scheme such as s3://bucket/prefix; docs/storage.md lists them"


class VersionedUri(Protocol):
    """A URI of content that changes with time, in a store that keeps its versions."""

    @property
    def root(self) -> str:
        """URI of everything that has the same versions, at the revision of this URI."""
        ...

    @property
    def path(self) -> str:
        """Folder or file below `root`; "" for all of it."""
        ...

    @property
    def revision(self) -> str:
        """What names the version, such as a branch or a commit; "" for the default."""
        ...

    @property
    def is_fixed(self) -> bool:
        """Whether the revision names one version for ever."""
        ...

    def newest(self) -> str:
        """Return the version that the revision refers to now."""
        ...

    def at(self, revision: str) -> VersionedUri:
        """Return the same path at another revision; "" is the default one. Its `str` is the URI."""
        ...


class Storage(Part):
    """A storage scheme. Its stores must be picklable, and safe to use from several threads."""

    def open(self, uri: str) -> Store:
        """Return the store rooted at `uri`. No request is sent before the store is used.

        Args:
            uri: with the scheme in front, and without a slash at the end.

        Raises:
            StorageError: the URI is incomplete, or a package is missing.
        """
        raise NotImplementedError

    def versioned(self, uri: str) -> VersionedUri | None:
        """Return the parts of a URI whose content has versions; None if the scheme keeps none.

        Raises:
            StorageError: the URI is incomplete.
        """
        return None


SCHEMES = Kind("storage scheme", Storage, __name__, "tidewheel.storage")


def open_uri(uri: str) -> Store:
    """Return the store of a URI of the form scheme://...

    Raises:
        StorageError: there is no such scheme, or the URI is incomplete.
    """
    scheme = scheme_of(uri)
    rest = uri.partition("://")[2]
    return _storage(uri).open(f"{scheme}://{rest.rstrip('/')}")


def versioned(uri: str) -> VersionedUri | None:
    """Return the parts of a URI whose content has versions; None for other URIs and local paths.

    Raises:
        StorageError: there is no such scheme, or the URI is incomplete.
    """
    return _storage(uri).versioned(uri) if scheme_of(uri) else None


def _storage(uri: str) -> Storage:
    try:
        return SCHEMES.build(scheme_of(uri))
    except ConfigError as error:
        raise StorageError(error.what, where=uri, fix=URI_FIX) from None


def bucket_uri(uri: str, credentials: str) -> str:
    """Return the URI of a bucket or a prefix of one, if it is complete.

    Args:
        uri: scheme://bucket/prefix.
        credentials: where the scheme's credentials are read from, for the message.

    Raises:
        StorageError: there is no bucket in it, or a user or password.
    """
    scheme, _, rest = uri.partition("://")
    bucket = rest.partition("/")[0]
    if not bucket:
        raise StorageError("no bucket in the URI", where=uri, fix=f"write {scheme}://bucket/prefix")
    if "@" in bucket:
        raise StorageError("a user or password in the URI", where=uri,
                           fix=f"write {scheme}://bucket/prefix; credentials are read from {credentials}")
    return uri
