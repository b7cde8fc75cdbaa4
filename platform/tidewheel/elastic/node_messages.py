"""Lines between the coordinator and a node's relay: the frames of several workers, those with equal bodies as one line.

A worker's connection at the relay has a number, which is never used again. Sequence numbers and acknowledgements remain
those of each worker, so that a worker may continue its session over another relay or without one.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter

from tidewheel.elastic.messages import (
    STRICT,
    Abort,
    Beat,
    FromCoordinator,
    GoOn,
    Hello,
    Here,
    Join,
    Over,
    Probe,
    Raise,
    Return,
    Stop,
    WorkerMessage,
    body_text,
    decoded,
)

B = TypeVar("B")
ANY_RANK = -1
"""Rank in the body of a `Join` for several workers; the line has their ranks."""


@dataclass(frozen=True)
class Beats:
    """The newest heartbeats of workers since the last line of this kind."""

    rows: tuple[tuple[int, int, int, int, float, int], ...]
    """Connection, acknowledgement, and the fields of `Beat`: generation, step, work and aborts."""
    type: Literal["beats"] = "beats"


@dataclass(frozen=True)
class Gone:
    """The processes of these workers have closed their connections."""

    type: Literal["gone"] = "gone"


@dataclass(frozen=True)
class Drop:
    """Close the connections of these workers."""

    type: Literal["drop"] = "drop"


@dataclass(frozen=True)
class FromNode:
    """A line of a relay."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    body: Annotated[Hello | Return | Here | WorkerMessage | Beats | Gone, Field(discriminator="type")]
    workers: tuple[tuple[int, int | None, int], ...] = ()
    """Connection, sequence number and acknowledgement of each worker that sends `body`."""


@dataclass
class Group(Generic[B]):
    """Frames with one body."""

    body: B
    workers: list[tuple[int, int | None, int]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """Ranks of the workers, if the body is a `Join`."""


class Groups(Generic[B]):
    """Collects frames. Each worker's remain in order."""

    def __init__(self) -> None:
        self._groups: list[Group[B]] = []
        self._by_key: dict[Hashable, int] = {}
        self._newest: dict[int, int] = {}  # last group of each worker

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, key: Hashable, body: B, worker: int, number: int | None, received: int) -> Group[B]:
        """Add a frame; return its group.

        Args:
            key: equal for equal bodies.
            body: what the frame holds.
            worker: number of the connection.
            number: sequence number.
            received: acknowledgement.
        """
        index = self._by_key.get(key, -1)
        if index <= self._newest.get(worker, -1):
            index = len(self._groups)
            self._groups.append(Group(body))
            self._by_key[key] = index
        self._newest[worker] = index
        group = self._groups[index]
        group.workers.append((worker, number, received))
        return group

    def take(self) -> list[Group[B]]:
        """Return the groups in order, and begin anew."""
        groups = self._groups
        self._groups = []
        self._by_key = {}
        self._newest = {}
        return groups


def add_order(groups: Groups[Any], worker: int, frame: FromCoordinator) -> None:
    """Add a frame of the coordinator.

    Args:
        groups: where to add it.
        worker: number of the worker's connection.
        frame: the frame.
    """
    body = frame.body
    if isinstance(body, Join):
        key: Hashable = (Join, body.generation, id(body.memory))
        rank = body.rank
        group = groups.add(key, body, worker, frame.number, frame.received)
        if not group.ranks:
            group.body = replace(body, rank=ANY_RANK)
        group.ranks.append(rank)
        return
    shared = isinstance(body, Abort | Stop | GoOn | Probe | Raise | Over)
    groups.add(body if shared else object(), body, worker, frame.number, frame.received)


def line_to_node(group: Group[Any]) -> bytes:
    """Return a line for a relay."""
    return line(body_text(group.body), group.workers, group.ranks)


def line(body: str, workers: list[tuple[int, int | None, int]], ranks: list[int] | None = None) -> bytes:
    """Return a line.

    Args:
        body: the body as JSON.
        workers: connection, sequence number and acknowledgement of each worker.
        ranks: rank of each worker; None for a line without ranks.
    """
    tail = "" if ranks is None else f',"ranks":{json.dumps(ranks)}'
    text = f'{{"body":{body},"workers":{json.dumps(workers)}{tail}}}'
    return text.encode("utf-8", "replace") + b"\n"


def split(text: bytes) -> tuple[str, dict[str, Any]]:
    """Return the text of the body of a line, and the line as JSON values.

    Raises:
        ValueError: it is no line with a body.
    """
    values = json.loads(text)
    if not isinstance(values, dict) or not isinstance(values.get("body"), dict):
        raise ValueError("a line without a body")
    start = text.index(b'{"body":') + len(b'{"body":')
    behind = b',"workers":' if "workers" in values else b',"number":'
    return text[start:text.rindex(behind)].decode(), values


def for_worker(body: str, rank: int | None, number: int | None, received: int) -> bytes:
    """Return the frame of one worker as `messages.encode` makes it.

    Args:
        body: text of the body of a line.
        rank: its rank, if the body is a `Join`.
        number: sequence number.
        received: acknowledgement.
    """
    if rank is not None:
        body = body.replace(f'"rank":{ANY_RANK}', f'"rank":{rank}', 1)
    return f'{{"body":{body},"number":{"null" if number is None else number},"received":{received}}}\n'.encode()


def beats_of(row: tuple[int, int, int, int, float, int]) -> Beat:
    """Return the heartbeat in a row of `Beats`."""
    return Beat(row[2], row[3], row[4], row[5])


_FROM_NODE = TypeAdapter(FromNode)


def decode_from_node(text: bytes) -> FromNode:
    """Return a line of a relay.

    Raises:
        MessageError: it is none.
    """
    return decoded(_FROM_NODE, text)
