"""Which commit of a data set on the Hugging Face hub a recipe reads: found once, noted in the output, kept for reruns.

A branch moves; the bytes of an output must not. So the first run notes in `hub_commits.json` what each URI of the hub
stood for, and later runs into the same output read the same commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidewheel import hub
from tidewheel.storage import Store, store

FILE = "hub_commits.json"


def resolved(uris: Iterable[str], output: str) -> dict[str, str]:
    """Return the commit of each data set that the URIs name, by its URI with the revision as it is given.

    Raises:
        StorageError: a data set or revision is not there, or the hub does not answer.
    """
    places = {place.repository: place for place in (hub.place_of(uri) for uri in uris if hub.is_hub(uri))}
    if not places:
        return {}
    noted = _noted(store(output))
    return {name: noted.get(name) or (place.revision if hub.is_commit(place.revision) else hub.commit_of(place))
            for name, place in sorted(places.items())}


def note(place: Store, commits: Mapping[str, str]) -> None:
    """Write to an output which commits it is made of, beside those of earlier runs."""
    noted = _noted(place)
    if commits and {**noted, **commits} != noted:
        place.write_json(FILE, {**noted, **commits})


def at_commit(uri: str, commits: Mapping[str, str]) -> str:
    """Return a URI of the hub with its commit as revision; others as they are."""
    if not hub.is_hub(uri):
        return uri
    place = hub.place_of(uri)
    return place.at(commits[place.repository])


def as_given(uri: str, commits: Mapping[str, str]) -> str:
    """Return the URI that `at_commit` was given: what a file is called does not depend on the commit."""
    if not hub.is_hub(uri):
        return uri
    place = hub.place_of(uri)
    names = [name for name, commit in commits.items()
             if commit == place.revision and hub.place_of(name).id == place.id]
    return place.at(hub.place_of(names[0]).revision) if names else uri


def _noted(place: Store) -> dict[str, str]:
    try:
        value = place.read_json(FILE)
    except FileNotFoundError:
        return {}
    return value if isinstance(value, dict) else {}
