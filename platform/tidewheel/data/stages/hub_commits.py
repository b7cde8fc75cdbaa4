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
    places = {place.repository: place for place in (hub.parse(uri) for uri in uris if hub.is_hub(uri))}
    if not places:
        return {}
    recorded = _recorded(store(output))
    return {name: recorded.get(name) or (place.revision if hub.is_commit(place.revision) else hub.commit_of(place))
            for name, place in sorted(places.items())}


def record(output: Store, commits: Mapping[str, str]) -> None:
    """Record in an output the commits that it is made from, beside those of earlier runs."""
    recorded = _recorded(output)
    if commits and {**recorded, **commits} != recorded:
        output.write_json(FILE, {**recorded, **commits})


def at_commit(uri: str, commits: Mapping[str, str]) -> str:
    """Return a hub URI with its commit as revision; return other URIs unchanged."""
    if not hub.is_hub(uri):
        return uri
    place = hub.parse(uri)
    return place.at(commits[place.repository])


def as_given(uri: str, commits: Mapping[str, str]) -> str:
    """Return the URI that `at_commit` got, so that names of files do not depend on the commit."""
    if not hub.is_hub(uri):
        return uri
    place = hub.parse(uri)
    names = [name for name, commit in commits.items()
             if commit == place.revision and hub.parse(name).id == place.id]
    return place.at(hub.parse(names[0]).revision) if names else uri


def _recorded(output: Store) -> dict[str, str]:
    try:
        value = output.read_json(FILE)
    except FileNotFoundError:
        return {}
    return value if isinstance(value, dict) else {}
