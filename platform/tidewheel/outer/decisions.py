"""Numbered decisions in a folder: each is made once, by whichever writer comes first, and never changes.

They use the slots of a run's commit log (`commit_protocol`), which hold on stores without conditional creates too.
"""

from __future__ import annotations

import uuid
from typing import Any

from pydantic import TypeAdapter

from tidewheel import commit_protocol as protocol
from tidewheel.commit_log import run_protocol
from tidewheel.commit_record import checked
from tidewheel.conditional_create import creates_are_conditional
from tidewheel.errors import StorageError
from tidewheel.storage import Store

Decision = dict[str, Any]


class Decisions:
    """Decisions 0, 1, 2, ... in a folder. Older ones than the newest `commit_protocol.KEPT_SLOTS` may be gone.

    Every method raises StorageError if the store does not answer or a decision is damaged; calling it again is safe.

    Args:
        store: the folder.
        fields: a dataclass that says which fields a decision has, and their types.
    """

    def __init__(self, store: Store, fields: type) -> None:
        self._store = store
        self._fields: TypeAdapter[Any] = TypeAdapter(fields)

    def newest(self) -> int:
        """Return the number of the newest decision, -1 before the first."""
        number, _ = run_protocol(self._store, protocol.newest())
        return int(number)

    def get(self, number: int) -> Decision | None:
        """Return a decision, None if it is not made yet or no longer kept.

        Raises:
            StorageError: it is damaged.
        """
        name = protocol.slot_name(number)
        try:
            data = self._store.read(name)
        except FileNotFoundError:
            return None
        try:
            decision = protocol.parsed(name, data)
            checked(self._fields, decision)
        except ValueError as error:
            raise StorageError(f"a record is damaged: {error}", where=self._store.at(name),
                               fix="restore it from a copy, or start anew with another outer.store") from None
        return decision

    def decide(self, number: int, proposed: Decision) -> Decision:
        """Make decision `number` unless it is made, and return the one that counts.

        Args:
            number: one more than the newest that the caller knows, or an earlier one.
            proposed: JSON values.

        Raises:
            StorageError: the decision is no longer kept.
        """
        conditional = creates_are_conditional(self._store)
        writer = uuid.uuid4().hex
        if run_protocol(self._store, protocol.append(number, proposed, writer, conditional)):
            if number % protocol.KEPT_SLOTS == 0:
                run_protocol(self._store, protocol.tidy(number))
            return {**proposed, "number": number, "writer": writer}
        decision = self.get(number)
        if decision is None:
            raise StorageError(f"decision {number} is no longer kept", where=self._store.uri,
                               fix="nothing: the newest outer state is taken when the run starts again")
        return decision
