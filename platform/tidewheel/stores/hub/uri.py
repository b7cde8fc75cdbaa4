"""URIs on the Hugging Face hub: data sets, hf://datasets/owner/name[@revision][/folder], and models, hf://owner/name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from tidewheel.errors import StorageError
from tidewheel.storage import join
from tidewheel.stores.hub.calls import endpoint, package, tried

SCHEME = "hf://"
TIMEOUT_SECONDS = 20
"""Deadline of a request about a data set or a model."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_URI = re.compile(r"hf://(?P<kind>datasets/)?(?!(?:datasets|models|spaces)/)(?P<id>[\w.-]+/[\w.-]+)"
                  r"(?:@(?P<revision>[^/]+))?(?:/(?P<path>.*))?$", re.IGNORECASE)


@dataclass(frozen=True)
class HubUri:
    """Parts of a hub URI, which is a `tidewheel.stores.VersionedUri`.

    Args:
        id: data set or model, as "owner/name".
        revision: branch, tag or commit; "" for the default, the branch `main`.
        path: folder or file in it; "" for all of it.
        kind: "dataset" or "model".
    """

    id: str
    revision: str
    path: str
    kind: str = "dataset"

    @property
    def root(self) -> str:
        """URI of the whole data set or model at this revision."""
        folder = "datasets/" if self.kind == "dataset" else ""
        return f"{SCHEME}{folder}{self.id}" + (f"@{self.revision}" if self.revision else "")

    @property
    def is_fixed(self) -> bool:
        """Whether the revision is the full name of a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> HubUri:
        """Return the same path at another revision; "" is the default one."""
        return HubUri(self.id, revision, self.path, self.kind)

    def newest(self) -> str:
        """Return the commit that the revision refers to now.

        Raises:
            StorageError: there is no such data set, model or revision, it may not be read, or the hub does not answer.
        """
        def request() -> str:
            info = package().HfApi(endpoint=endpoint()).repo_info(
                self.id, repo_type=self.kind, revision=unquote(self.revision) or None, timeout=TIMEOUT_SECONDS)
            return str(info.sha)

        return tried(request, self.root)

    def __str__(self) -> str:
        return join(self.root, self.path)


def parse(uri: str) -> HubUri:
    """Return the parts of a hub URI.

    Raises:
        StorageError: the URI names no data set and no model.
    """
    match = _URI.match(uri)
    if not match:
        raise StorageError("not the URI of a data set or a model on the Hugging Face hub", where=uri,
                           fix="write hf://datasets/owner/name, or hf://owner/name for a model, followed by @revision "
                               "and /folder if needed; a slash in a revision is %2F")
    return HubUri(match["id"], match["revision"] or "", (match["path"] or "").strip("/"),
                  "dataset" if match["kind"] else "model")
