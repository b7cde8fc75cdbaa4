"""A workflow's own files in the store: records of published steps, attempts, logs and leases.

Below the workflow's output, `steps/<name>-<key>.json` is written last and marks a step as published,
`attempts/<name>-<key>.json` holds its last attempt, `logs/<name>-<key>.jsonl` its log, and `leases/` the driver that
runs it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tidewheel import storage
from tidewheel.errors import TidewheelError, root_cause
from tidewheel.jsonlog import JsonLog
from tidewheel.provenance import without_secrets
from tidewheel.workflow.graph import Node
from tidewheel.workflow.kinds import KINDS


@dataclass(frozen=True)
class Record:
    """A published step."""

    name: str
    kind: str
    key: str
    place: str
    artifact: dict[str, Any]
    """Description of the output, with the content's "hash"."""
    recipe: Any
    content: Any
    inputs: dict[str, str]
    """Keys of the steps that it read, by role."""
    seconds: float
    finished: float
    """Unix time."""


class Records:
    """Records and attempts of the workflows below one output."""

    def __init__(self, output: str) -> None:
        self.store = storage.store(output)

    def published(self, node: Node, *, check: bool = True) -> Record | None:
        """Return the record of a step, or None if it is not published.

        With `check`, a step whose output is gone or changed is not published either.
        """
        try:
            record = Record(**self.store.read_json(f"steps/{node.id}.json"))
        except FileNotFoundError:
            return None
        return record if not check or KINDS[node.kind].intact(node.place, record.artifact) else None

    def publish(self, node: Node, inputs: Mapping[str, str], artifact: dict[str, Any], seconds: float) -> Record:
        """Write the record of a finished step, and return it.

        Args:
            node: the step.
            inputs: keys of the steps that it read, by role.
            artifact: description of its output, with its "hash".
            seconds: time that it took.
        """
        record = Record(node.name, node.kind, node.key, node.place, artifact, without_secrets(node.recipe),
                        without_secrets(node.content), dict(inputs), seconds, time.time())
        self.store.write_json(f"steps/{node.id}.json", asdict(record))
        return record

    def all(self) -> list[Record]:
        """Return every record, the newest last."""
        records = [Record(**self.store.read_json(entry.key)) for entry in self.store.list("steps")]
        return sorted(records, key=lambda record: record.finished)

    def attempt(self, node: Node) -> dict[str, Any] | None:
        """Return the last attempt at a step: "state" (running, failed, stopped), "error", "log", "time"."""
        try:
            attempt: dict[str, Any] = self.store.read_json(f"attempts/{node.id}.json")
        except FileNotFoundError:
            return None
        return attempt

    def record_attempt(self, node: Node, state: str, error: BaseException | None = None) -> None:
        """Record the state of the current attempt at a step.

        Args:
            node: the step.
            state: running, failed or stopped.
            error: why it failed.
        """
        attempt = {"state": state, "time": time.time(), "log": self.log_uri(node)}
        if error is not None:
            attempt["error"] = without_secrets(message(error))
        self.store.write_json(f"attempts/{node.id}.json", attempt)

    def log_uri(self, node: Node) -> str:
        """Return the URI of the step's log."""
        return self.store.at(f"logs/{node.id}.jsonl")


class StepLog:
    """A step's log; call it with a line of text."""

    def __init__(self, output: str, node_id: str) -> None:
        self._log = JsonLog(storage.store(output), f"logs/{node_id}.jsonl")

    def __call__(self, text: str) -> None:
        self._log.append({"time": time.time(), "text": without_secrets(text)})

    def failed(self, error: BaseException) -> None:
        """Write an error with its stack trace."""
        self("".join(traceback.format_exception(error)))
        self.flush()

    def flush(self) -> None:
        """Write the collected lines to the store."""
        self._log.flush()


def message(error: BaseException) -> str:
    """Return an error's message for users: of other libraries' errors, the last line of the innermost cause."""
    cause = root_cause(error)
    if isinstance(cause, TidewheelError):
        return str(cause)
    inner = getattr(error, "cause", None) or error
    lines = [line for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[-1] if lines else ''}"
