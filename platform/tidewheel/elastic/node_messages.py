"""Lines between the coordinator and a node's relay: the frames of several workers, those with equal bodies as one line.

A worker's connection at the relay has a number, which is never used again. Sequence numbers and acknowledgements remain
those of each worker, so that a worker may continue its session over another relay or without one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from tidewheel.elastic.messages import STRICT, Hello, Here, Return, WorkerMessage, decoded, frame_line
from tidewheel.elastic.outgoing import ANY_RANK, Outgoing


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


class Groups:
    """Collects frames of workers. Those with equal bodies become one line, and each worker's remain in order."""

    def __init__(self) -> None:
        self._groups: list[tuple[str, list[tuple[int, int | None, int]]]] = []
        self._by_body: dict[str, int] = {}
        self._newest: dict[int, int] = {}  # last group of each worker

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, body: str, worker: int, number: int | None, received: int) -> None:
        """Add a frame.

        Args:
            body: the body as JSON.
            worker: number of the connection.
            number: sequence number.
            received: acknowledgement.
        """
        index = self._by_body.get(body, -1)
        if index <= self._newest.get(worker, -1):
            index = len(self._groups)
            self._groups.append((body, []))
            self._by_body[body] = index
        self._newest[worker] = index
        self._groups[index][1].append((worker, number, received))

    def take(self) -> list[tuple[str, list[tuple[int, int | None, int]]]]:
        """Return bodies in order, each with the workers that sent it; begin anew."""
        groups = self._groups
        self._groups = []
        self._by_body = {}
        self._newest = {}
        return groups


class Orders:
    """Collects what the coordinator sends to the workers of a node. A frame for several of them is one line."""

    def __init__(self) -> None:
        self._frames: list[tuple[Outgoing, list[int], list[int]]] = []

    def __bool__(self) -> bool:
        return bool(self._frames)

    def add(self, worker: int, frame: Outgoing, rank: int = ANY_RANK) -> None:
        """Add a frame.

        Args:
            worker: number of the worker's connection.
            frame: the frame; workers that get the same one follow each other.
            rank: rank of the worker, if the body is a `Join`.
        """
        if not self._frames or self._frames[-1][0] is not frame:
            self._frames.append((frame, [], []))
        _, workers, ranks = self._frames[-1]
        workers.append(worker)
        if rank != ANY_RANK:
            ranks.append(rank)

    def take(self) -> bytes:
        """Return the lines in order, and begin anew."""
        frames = self._frames
        self._frames = []
        return b"".join(line_to_node(frame, workers, ranks) for frame, workers, ranks in frames)


def line_to_node(frame: Outgoing, workers: list[int], ranks: list[int]) -> bytes:
    """Return a line of the coordinator for a relay.

    Args:
        frame: what the workers get.
        workers: numbers of their connections; none: the line only says that the coordinator lives.
        ranks: their ranks, if the body is a `Join`.
    """
    more = f',"workers":{workers}'  # lists of integers print as JSON
    if ranks:
        more += f',"ranks":{ranks}'
    return frame_line(frame.text, frame.number, frame.received, more)


def line(body: str, workers: list[tuple[int, int | None, int]]) -> bytes:
    """Return a line of a relay.

    Args:
        body: the body as JSON.
        workers: connection, sequence number and acknowledgement of each worker.
    """
    return f'{{"body":{body},"workers":{json.dumps(workers)}}}\n'.encode("utf-8", "replace")


def split(text: bytes) -> tuple[str, dict[str, Any]]:
    """Return the text of the body of a worker's frame or an order, and the line as JSON values.

    Raises:
        ValueError: it is no frame.
    """
    values = json.loads(text)
    if not isinstance(values, dict) or not isinstance(values.get("body"), dict):
        raise ValueError("a line without a body")
    start = text.index(b'{"body":') + len(b'{"body":')
    return text[start:text.rindex(b',"number":')].decode(), values


_FROM_NODE = TypeAdapter(FromNode)


def decode_from_node(text: bytes) -> FromNode:
    """Return a line of a relay.

    Raises:
        MessageError: it is none.
    """
    return decoded(_FROM_NODE, text)
