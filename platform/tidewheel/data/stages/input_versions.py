"""Pin inputs whose content has versions, such as data sets of the Hugging Face hub, to those that the first run reads.

A branch moves, but the bytes of an output must not change. So the first run records in `hub_commits.json` the version
(a commit) of each such URI, and later runs into the same output read the same versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidewheel.storage import Store, store
from tidewheel.stores import versioned

FILE = "hub_commits.json"


def resolved(uris: Iterable[str], output: str) -> dict[str, str]:
    """Return the version of each data set that the URIs name, by its URI with the revision as given.

    Raises:
        StorageError: a data set or revision does not exist, or its store does not answer.
    """
    inputs = {named.root: named for uri in uris if (named := versioned(uri)) is not None}
    if not inputs:
        return {}
    recorded = _recorded(store(output))
    return {root: recorded.get(root) or (named.revision if named.is_fixed else named.newest())
            for root, named in sorted(inputs.items())}


def record(output: Store, commits: Mapping[str, str]) -> None:
    """Record in an output the versions that it is made from, beside those of earlier runs."""
    recorded = _recorded(output)
    if commits and {**recorded, **commits} != recorded:
        output.write_json(FILE, {**recorded, **commits})


def at_commit(uri: str, commits: Mapping[str, str]) -> str:
    """Return a URI with its version as revision; return URIs without versions unchanged."""
    named = versioned(uri)
    return uri if named is None else str(named.at(commits[named.root]))


def as_given(uri: str, commits: Mapping[str, str]) -> str:
    """Return the URI that `at_commit` got, so that names of files do not depend on the version."""
    named = versioned(uri)
    if named is None:
        return uri
    for root, commit in commits.items():
        given = versioned(root)
        if given is not None and commit == named.revision and given.at(commit).root == named.root:
            return str(named.at(given.revision))
    return uri


def _recorded(output: Store) -> dict[str, str]:
    try:
        value = output.read_json(FILE)
    except FileNotFoundError:
        return {}
    return value if isinstance(value, dict) else {}
