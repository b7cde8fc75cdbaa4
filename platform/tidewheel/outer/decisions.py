"""Numbered decisions in a folder: each is made once, by whichever writer comes first, and never changes.

They use the slots of a run's commit log (`commit_protocol`), which hold on stores without conditional creates too.
"""

from __future__ import annotations

import uuid
from typing import Any

from pydantic import TypeAdapter

from tidewheel import commit_protocol as protocol
from tidewheel.commit_log import damage_named, run_protocol
from tidewheel.commit_record import checked
from tidewheel.conditional_create import creates_are_conditional
from tidewheel.errors import StorageError
from tidewheel.storage import Store

Decision = dict[str, Any]
DAMAGE_FIX = "restore it from a copy, or start anew with another outer.store: groups may have acted on it"


class Decisions:
    """Decisions 0, 1, 2, ... in a folder. Older ones than the newest `commit_protocol.KEPT_SLOTS` may be gone.

    Every method raises StorageError if the store does not answer or a decision is damaged; calling it again is safe.

    Args:
        store: the folder.
        fields: a dataclass that says which fields a decision has, and their types; None: any.
    """

    def __init__(self, store: Store, fields: type | None = None) -> None:
        self._store = store
        self._fields: TypeAdapter[Any] = TypeAdapter(fields or Decision)

    def newest(self) -> int:
        """Return the number of the newest decision, -1 before the first."""
        number, _ = self._run(protocol.newest())
        return int(number)

    def get(self, number: int) -> Decision | None:
        """Return a decision, None if it is not made yet or no longer kept."""
        decision: Decision | None = self._run(protocol.read(number))
        if decision is not None:
            with damage_named(self._store.at(protocol.slot_name(number)), DAMAGE_FIX):
                checked(self._fields, decision)
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
        made = self._run(protocol.append(number, proposed, uuid.uuid4().hex, conditional))
        if made and number % protocol.KEPT_SLOTS == 0:
            self._run(protocol.tidy(number))
        decision = self.get(number)
        if decision is None:
            raise StorageError(f"decision {number} is no longer kept", where=self._store.uri,
                               fix="nothing: the newest outer state is taken when the run starts again")
        return decision

    def _run(self, steps: protocol.Protocol) -> Any:
        return run_protocol(self._store, steps, damage_fix=DAMAGE_FIX)
