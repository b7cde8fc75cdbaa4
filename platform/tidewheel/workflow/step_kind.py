"""What a workflow needs to know about one kind of step, and what kinds share. A step here is its entry (`steps`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidewheel import storage

Entry = Mapping[str, Any]
Log = Callable[[str], None]
SHARDS, VALIDATION = "shards", "validation"


@dataclass(frozen=True)
class Task:
    """A step to run."""

    entry: Entry
    place: str
    """URI that it writes to."""
    key: str
    input: str
    """URI that relative paths are below."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """URIs of the steps that it reads, by role."""
    max_workers: int | None = None
    """A training's share of the cluster while others train beside it."""
    function: Callable[..., Any] | None = None
    """The function of a `Call` that cannot be imported."""


class StepKind(Protocol):
    """What a workflow needs to know about one kind of step."""

    def recipe(self, entry: Entry) -> Any:
        """Return the settings that decide the result, as JSON values."""

    def content(self, entry: Entry, input: str, output: str) -> Any:
        """Return the identity of everything that the step reads from outside the workflow, as JSON values.

        Args:
            entry: the step.
            input: URI that relative paths are below.
            output: URI of the workflow.
        """

    def place(self, output: str, entry: Entry, key: str) -> str:
        """Return the URI of the step's output.

        Args:
            output: URI of the workflow.
            entry: the step.
            key: key of the step.
        """

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        """Make the output, or go on making it, and return its description with its "hash".

        Args:
            task: the step.
            log: gets lines of progress.
        """

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        """Return whether the output is still what `artifact` describes.

        Args:
            place: URI of the output.
            artifact: its description, as `run` returned it.
        """


class Sparse:
    """Pass on one line every few seconds, and drop the others."""

    def __init__(self, log: Log, seconds: float = 5.0) -> None:
        self._log = log
        self._seconds = seconds
        self._last = 0.0

    def __call__(self, text: str, now: bool = False) -> None:
        if now or time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            self._log(text)


def is_same(uri: str, key: str, expected: str) -> bool:
    """Return whether a file exists and has the expected hash.

    Args:
        uri: its folder.
        key: its key below the folder.
        expected: content hash.
    """
    try:
        return storage.store(uri).hash(key) == expected
    except FileNotFoundError:
        return False


def manifest_hash(uri: str) -> str:
    """Return the hash of a shard set's manifest, or the URI itself while there is none."""
    try:
        return storage.store(uri).hash("manifest.json")
    except FileNotFoundError:
        return uri


def folder_hash(uri: str, value: Any = None) -> str:
    """Return the hash of all files of a folder and of a JSON value."""
    folder_store = storage.store(uri)
    files = [[entry.key, folder_store.hash(entry.key)] for entry in folder_store.list()]
    return storage.content_hash(json.dumps([files, value], sort_keys=True).encode())
