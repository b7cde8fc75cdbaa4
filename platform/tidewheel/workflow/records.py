"""What a workflow keeps in the store beside the artifacts: records of published steps, attempts, logs, leases.

Below the workflow's output: `steps/<name>-<key>.json` is written last and says that a step is published;
`attempts/<name>-<key>.json` is the last try; `logs/<name>-<key>.jsonl` what it said; `leases/` who is at it.
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
    """With the content's "hash"."""
    recipe: Any
    content: Any
    inputs: dict[str, str]
    """Keys of the steps it read, by role."""
    seconds: float
    finished: float
    """Unix time."""


class Records:
    """Records and attempts of the workflows below one output."""

    def __init__(self, output: str) -> None:
        self.store = storage.store(output)

    def published(self, node: Node, *, check: bool = True) -> Record | None:
        """The record of a step; None when it is not published, or (`check`) what it made is gone or changed."""
        try:
            record = Record(**self.store.read_json(f"steps/{node.id}.json"))
        except FileNotFoundError:
            return None
        return record if not check or KINDS[node.kind].intact(node.place, record.artifact) else None

    def publish(self, node: Node, inputs: Mapping[str, str], artifact: dict[str, Any], seconds: float) -> Record:
        """Write the record of a step that is done."""
        record = Record(node.name, node.kind, node.key, node.place, artifact, without_secrets(node.recipe),
                        without_secrets(node.content), dict(inputs), seconds, time.time())
        self.store.write_json(f"steps/{node.id}.json", asdict(record))
        return record

    def all(self) -> list[Record]:
        """Every record, newest last."""
        found = [Record(**self.store.read_json(entry.key)) for entry in self.store.list("steps")]
        return sorted(found, key=lambda record: record.finished)

    def attempt(self, node: Node) -> dict[str, Any] | None:
        """The last try of a step: "state" (running, failed, stopped), "error", "log", "time"."""
        try:
            found: dict[str, Any] = self.store.read_json(f"attempts/{node.id}.json")
        except FileNotFoundError:
            return None
        return found

    def tried(self, node: Node, state: str, error: BaseException | None = None) -> None:
        """Write down how far a try is."""
        told = {} if error is None else {"error": without_secrets(message(error))}
        self.store.write_json(f"attempts/{node.id}.json", {
            "state": state, "time": time.time(), "log": self.log_uri(node), **told})

    def log_uri(self, node: Node) -> str:
        """Where the step's log is."""
        return self.store.at(f"logs/{node.id}.jsonl")


class StepLog:
    """Lines of a step's log."""

    def __init__(self, output: str, node_id: str) -> None:
        self._log = JsonLog(storage.store(output), f"logs/{node_id}.jsonl")

    def __call__(self, text: str) -> None:
        self._log.append({"time": time.time(), "text": without_secrets(text)})

    def failed(self, error: BaseException) -> None:
        """The error with its trace."""
        self("".join(traceback.format_exception(error)))
        self.flush()

    def flush(self) -> None:
        """Write out what is collected."""
        self._log.flush()


def message(error: BaseException) -> str:
    """What to tell people about an error: ours says it all, of others the last line of the innermost."""
    cause = root_cause(error)
    if isinstance(cause, TidewheelError):
        return str(cause)
    inner = getattr(error, "cause", None) or error
    lines = [line for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[-1] if lines else ''}"
