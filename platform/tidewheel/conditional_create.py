"""Probe whether a store honours "create this object unless it exists".

Some stores accept the condition and overwrite all the same. Leases, the commit log and manifests ask here first. On a
store that ignores the condition they use a protocol that does without it.
"""

from __future__ import annotations

import uuid

from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.storage import Store

_answers: dict[tuple[type[Store], str], bool] = {}
"""Answers of this process, by kind of store and identity: one probe serves all prefixes of a bucket."""


def creates_are_conditional(store: Store) -> bool:
    """Return whether a second create of the same object fails in `store`; try it once per process and store.

    Raises:
        StorageAwayError: the store does not answer.
    """
    key = (type(store), store.identity())
    if key not in _answers:
        _answers[key] = _try(store)
    return _answers[key]


def _try(store: Store) -> bool:
    name = f"probe-{uuid.uuid4().hex}"
    try:
        store.create(name, b"1")
        refused = not store.create(name, b"2")
        return refused and store.read(name) == b"1"
    except StorageAwayError:
        raise
    except StorageError:  # the store refuses the condition itself
        return False
    finally:
        store.delete(name)
