"""Storage schemes: what URIs of the form scheme://... refer to. Each built-in one is a module named by its scheme.

    class Vault(tw.Storage):
        def open(self, uri: str) -> tw.Store:
            return VaultStore(uri)

A class of the user's own is named in the URI, as `my_module:Vault://bucket/prefix`. An installed package's entry point
in the group `tidewheel.storage` gives it a scheme of its own: `vault://bucket/prefix`.
"""

from __future__ import annotations

from tidewheel.errors import ConfigError, StorageError
from tidewheel.parts import Kind, Part
from tidewheel.storage import Store


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


SCHEMES = Kind("storage scheme", Storage, __name__, "tidewheel.storage")


def open_uri(scheme: str, rest: str) -> Store:
    """Return the store of the URI scheme://rest.

    Args:
        scheme: name of the scheme, or `module:Class`.
        rest: what follows "://".

    Raises:
        StorageError: there is no such scheme, or the URI is incomplete.
    """
    try:
        storage = SCHEMES.build(scheme)
    except ConfigError as error:
        raise StorageError(error.what, where=f"{scheme}://{rest}",
                           fix="use a local path, file:///path, s3://bucket/prefix, gs://bucket/prefix or "
                               "az://container/prefix") from None
    return storage.open(f"{scheme}://{rest.rstrip('/')}")


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
