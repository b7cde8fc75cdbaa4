"""Probe whether a store honours "create this object unless it exists".

Some stores accept the condition and overwrite the object anyway. Leases, the commit log and manifests check here first.
On a store that ignores the condition they use a protocol that does not need it.
"""

from __future__ import annotations

import uuid

from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.storage import Store

_results: dict[tuple[type[Store], str], bool] = {}
"""Results of this process's probes, by type and identity of the store. One probe serves all prefixes of a bucket."""


def creates_are_conditional(store: Store) -> bool:
    """Return whether a second create of the same object fails in `store`; probe each store once per process.

    Raises:
        StorageAwayError: the store does not answer.
    """
    key = (type(store), store.identity())
    if key not in _results:
        _results[key] = _probe(store)
    return _results[key]


def _probe(store: Store) -> bool:
    name = f"probe-{uuid.uuid4().hex}"
    try:
        store.create(name, b"1")
        refused = not store.create(name, b"2")
        return refused and store.read(name) == b"1"
    except StorageAwayError:
        raise
    except StorageError:  # the store rejects the condition itself
        return False
    finally:
        store.delete(name)
