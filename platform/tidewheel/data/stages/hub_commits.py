"""Pin data sets of the Hugging Face hub to the commits that the first run into an output reads.

A branch moves, but the bytes of an output must not change. So the first run records in `hub_commits.json` the commit
of each hub URI, and later runs into the same output read the same commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidewheel import hub
from tidewheel.storage import Store, store

FILE = "hub_commits.json"


def resolved(uris: Iterable[str], output: str) -> dict[str, str]:
    """Return the commit of each data set that the URIs name, by its URI with the revision as given.

    Raises:
        StorageError: a data set or revision does not exist, or the hub does not answer.
    """
    uris_by_repository = {parsed.repository: parsed for parsed in (hub.parse(uri) for uri in uris if hub.is_hub(uri))}
    if not uris_by_repository:
        return {}
    recorded = _recorded(store(output))
    return {name: recorded.get(name) or (parsed.revision if hub.is_commit(parsed.revision) else hub.commit_of(parsed))
            for name, parsed in sorted(uris_by_repository.items())}


def record(output: Store, commits: Mapping[str, str]) -> None:
    """Record in an output the commits that it is made from, beside those of earlier runs."""
    recorded = _recorded(output)
    if commits and {**recorded, **commits} != recorded:
        output.write_json(FILE, {**recorded, **commits})


def at_commit(uri: str, commits: Mapping[str, str]) -> str:
    """Return a hub URI with its commit as revision; return other URIs unchanged."""
    if not hub.is_hub(uri):
        return uri
    parsed = hub.parse(uri)
    return parsed.at(commits[parsed.repository])


def as_given(uri: str, commits: Mapping[str, str]) -> str:
    """Return the URI that `at_commit` got, so that names of files do not depend on the commit."""
    if not hub.is_hub(uri):
        return uri
    parsed = hub.parse(uri)
    names = [name for name, commit in commits.items()
             if commit == parsed.revision and hub.parse(name).id == parsed.id]
    return parsed.at(hub.parse(names[0]).revision) if names else uri


def _recorded(output: Store) -> dict[str, str]:
    try:
        value = output.read_json(FILE)
    except FileNotFoundError:
        return {}
    return value if isinstance(value, dict) else {}
