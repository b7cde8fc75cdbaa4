"""What the coordinator sends: a frame for one worker or for thousands, whose JSON is made once."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from tidewheel.elastic.messages import Join, body_text, frame_line

ANY_RANK = -1
"""Rank in the body of a `Join` for several workers; each worker's own rank goes beside the body."""


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A frame of the coordinator for one or several workers."""

    body: Any
    """A message of `FromCoordinator`, or of `node_messages` for a relay."""
    number: int | None = None
    received: int = 0

    @functools.cached_property
    def text(self) -> str:
        """The body as JSON."""
        return body_text(self.body)

    def line(self, rank: int = ANY_RANK) -> bytes:
        """Return the line for a worker's own connection, as `messages.encode` makes it.

        Args:
            rank: its rank, if the body is a `Join`.
        """
        return frame_line(with_rank(self.text, rank), self.number, self.received)

    def message(self, rank: int = ANY_RANK) -> Any:
        """Return the message that a worker gets."""
        return self.body if rank == ANY_RANK or not isinstance(self.body, Join) else replace(self.body, rank=rank)


def with_rank(body: str, rank: int) -> str:
    """Return the JSON of a message with a worker's own rank.

    Args:
        body: the JSON for all workers.
        rank: the rank; `ANY_RANK` for a message without one.
    """
    return body if rank == ANY_RANK else body.replace(f'"rank":{ANY_RANK}', f'"rank":{rank}', 1)
