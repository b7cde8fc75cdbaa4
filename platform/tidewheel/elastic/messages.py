"""Messages between the coordinator and its workers, and their encoding as lines of JSON.

Each message is a frozen dataclass with a `type` that names it on the wire. `FromWorker` and `FromCoordinator` are the
frames that carry messages; a frame also holds the sequence number of its message and an acknowledgement. The decoder
refuses unknown types, unknown or missing fields and values of another type, so code that handles a message may rely on
its fields. Nothing is unpickled.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.train.history import RunHistory

T = TypeVar("T")

BEAT_SECONDS = 0.25
"""Time between two heartbeats of a worker that has not joined a generation yet."""

STRICT = ConfigDict(extra="forbid", strict=True)
"""Holds for a frame and for all dataclasses inside it."""


class MessageError(ValueError):
    """A line is no valid message."""


class ExitReason(StrEnum):
    """Why a worker left its generation."""

    FINISHED = "finished"
    """The last step is done."""
    PREEMPTED = "preempted"
    """The coordinator asked it to leave at a step boundary."""
    FAILED = "failed"
    """An error that may not occur again after a restart."""
    FATAL = "fatal"
    """An error that a restart does not fix."""


# -- from a worker -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Hello:
    """First message of a worker process: it is ready for a rank."""

    name: str
    """Unique name of the process."""
    node: str
    """Id of its node."""
    token: str = field(repr=False)
    """The run's token."""
    spot: bool = False
    """The node may be taken away at any time."""
    device: str = ""
    """GPUs of the process, as its node numbers them; "" on CPU."""
    problem: str = ""
    """What its test before the start found; "" if it passed."""
    clock: float = 0.0
    """Its Unix time when it sent this; 0: unknown."""
    key: str = field(default="", repr=False)
    """Key of its session, by which it says hello again on another connection; "": the coordinator makes one."""
    connection: int = 0
    """Number of this connection among those of the process: the coordinator uses the newest."""
    type: Literal["hello"] = "hello"


@dataclass(frozen=True)
class Return:
    """First message on a new connection of a worker that lost its connection."""

    name: str
    token: str = field(repr=False)
    session: str = field(repr=False)
    """Key of the session to continue, from `Welcome`."""
    connection: int = 0
    """As in `Hello`."""
    type: Literal["return"] = "return"


@dataclass(frozen=True)
class NodeHello:
    """First message of a node's relay, whose connection carries those of the node's workers (`node_messages`)."""

    node: str
    """Id of the node."""
    token: str = field(repr=False)
    type: Literal["node_hello"] = "node_hello"


@dataclass(frozen=True)
class Here:
    """Second message of a worker that returns: it has read the welcome. Its frame acknowledges what it received."""

    type: Literal["here"] = "here"


@dataclass(frozen=True)
class Beat:
    """Heartbeat."""

    generation: int
    step: int
    """Last step done in `generation`; 0 before the first."""
    work: float = 0.0
    """CPU seconds used by the training thread."""
    aborts: int = -1
    """Newest generation whose `Abort` this worker has received; -1 for none."""
    type: Literal["beat"] = "beat"


@dataclass(frozen=True)
class StepDone:
    """A step is done."""

    generation: int
    step: int
    steps: int
    """Steps of the whole run."""
    metrics: dict[str, Any]
    """Metrics for the driver's progress display."""
    type: Literal["step"] = "step"


@dataclass(frozen=True)
class WorkerEvent:
    """A record for the run's events.jsonl."""

    kind: str
    detail: dict[str, Any]
    time: float
    """Unix seconds, by the worker's clock."""
    type: Literal["event"] = "event"


@dataclass(frozen=True)
class Leaving:
    """The worker's process was asked to end, by SIGTERM."""

    type: Literal["leaving"] = "leaving"


@dataclass(frozen=True)
class Left:
    """The worker has left its generation."""

    generation: int
    reason: ExitReason
    text: str = ""
    """The error, if one ended the generation."""
    error_kind: str = ""
    """Class of an error that this worker raised first; "" if it left because of another worker."""
    accused: tuple[int, ...] = ()
    """Ranks that do not respond, according to this worker."""
    saved_step: int | None = None
    """Step of the committed save of a preempted worker."""
    type: Literal["left"] = "left"


@dataclass(frozen=True)
class Probed:
    """Result of a self-test."""

    problem: str
    """"" if the worker passed."""
    clock: float = 0.0
    """Its Unix time when it sent this; 0: unknown."""
    type: Literal["probed"] = "probed"


# -- from the coordinator ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Welcome:
    """Answer to `Hello` and `Return`."""

    session: str = field(repr=False)
    type: Literal["welcome"] = "welcome"


@dataclass(frozen=True)
class End:
    """Answer to `Return` when the session is over: the process must end."""

    type: Literal["end"] = "end"


@dataclass(frozen=True)
class Received:
    """Empty message, for the acknowledgement in its frame."""

    type: Literal["received"] = "received"


@dataclass(frozen=True)
class AgentTable:
    """The memory agents of all nodes."""

    addresses: tuple[Address, ...]
    """Each once. Those of nodes without a rank may hold snapshots."""
    domains: dict[str, tuple[int, ...]]
    """Indexes of the agents of each labelled failure domain."""
    token: str = field(repr=False)
    """Token of the agents."""


@dataclass(frozen=True)
class MemoryPlacement:
    """Memory agents for the workers of one generation. Its size grows with the nodes, not with the ranks."""

    agents: AgentTable | None
    """None if it is the table of the worker's last `Join`."""
    ranks: tuple[tuple[int, int, int], ...]
    """Ranks in order, as (agent, nodes, ranks): this many ranks on each of so many nodes, whose agents have the indexes
    `agent`, `agent` + 1, ... A generation whose nodes are full is one row."""
    gone: tuple[int, ...] = ()
    """Indexes of agents of the table that have ended."""

    @functools.cached_property
    def text(self) -> str:
        """The placement as JSON. It is made once for the messages to all workers of a generation."""
        return _json(asdict(self))


@dataclass(frozen=True)
class Join:
    """Train in a new generation."""

    generation: int
    rank: int
    world_size: int
    store: tuple[str, int] = ("", 0)
    """Host and port of the store at which the ranks meet."""
    memory: MemoryPlacement | None = None
    """None without a memory tier."""
    past: RunHistory | None = None
    """The run so far; None to read it from storage."""
    beat_seconds: float = BEAT_SECONDS
    """Time between two heartbeats during the generation."""
    type: Literal["join"] = "join"


@dataclass(frozen=True)
class Abort:
    """Leave this generation, and all before it, at once."""

    generation: int
    type: Literal["abort"] = "abort"


@dataclass(frozen=True)
class Stop:
    """Leave the generation at the next step boundary."""

    generation: int
    save: bool = False
    """Save to storage first."""
    type: Literal["stop"] = "stop"


@dataclass(frozen=True)
class GoOn:
    """Ignore an earlier `Stop`."""

    generation: int
    type: Literal["go_on"] = "go_on"


@dataclass(frozen=True)
class Probe:
    """Run the self-test and answer with `Probed`."""

    type: Literal["probe"] = "probe"


@dataclass(frozen=True)
class Raise:
    """End the training function by an error."""

    text: str = ""
    """Why Ray Train must restart its workers; "" to raise the worker's own last error."""
    type: Literal["raise"] = "raise"


@dataclass(frozen=True)
class Over:
    """The run is over and its result is written: return it."""

    type: Literal["over"] = "over"


@dataclass(frozen=True)
class TakenOver:
    """Another driver owns the run: the process must end at once. A relay says so when the coordinator cannot."""

    reason: str
    type: Literal["taken_over"] = "taken_over"


Greeting = Hello | Return | NodeHello
WorkerMessage = Beat | StepDone | WorkerEvent | Leaving | Left | Probed
Order = Join | Probe | Raise | Over
"""Messages that a worker's training thread waits for."""
CoordinatorMessage = Order | Abort | Stop | GoOn | TakenOver
Message = WorkerMessage | CoordinatorMessage


@dataclass(frozen=True)
class FromWorker:
    """A line of a worker."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    body: Annotated[Greeting | Here | WorkerMessage, Field(discriminator="type")]
    number: int | None = None
    """Sequence number; None for a message that is not sent again after a reconnect."""
    received: int = 0
    """Sequence number of the last message that the worker received."""


@dataclass(frozen=True)
class FromCoordinator:
    """A line of the coordinator."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    body: Annotated[Welcome | End | Received | CoordinatorMessage, Field(discriminator="type")]
    number: int | None = None
    received: int = 0


_FROM_WORKER = TypeAdapter(FromWorker)
_FROM_COORDINATOR = TypeAdapter(FromCoordinator)


def encode(frame: FromWorker | FromCoordinator) -> bytes:
    """Return a frame as one line of UTF-8 JSON. Values in free-form details that JSON does not know become strings."""
    return frame_line(body_text(frame.body), frame.number, frame.received)


def frame_line(body: str, number: int | None, received: int, more: str = "") -> bytes:
    """Return a frame as a line.

    Args:
        body: the message as JSON.
        number: sequence number.
        received: acknowledgement.
        more: JSON of further fields, each behind a comma.
    """
    text = f'{{"body":{body},"number":{"null" if number is None else number},"received":{received}{more}}}'
    return text.encode("utf-8", "replace") + b"\n"  # undecodable bytes of file names do not make a line invalid


def body_text(body: Any) -> str:
    """Return the JSON of a message."""
    match body:
        case Join() as join:
            return _join(join)
        case Abort() | Stop() | GoOn() | Probe() | Over() as order:  # the same for all workers of a generation
            return _order(order)
        case other:
            return _json(vars(other))  # only a join has dataclasses inside


def _join(join: Join) -> str:
    """Return the JSON of a join. Only what differs between ranks is made for each."""
    fields = {**vars(join), "past": None if join.past is None else vars(join.past)}
    del fields["memory"]
    return f'{_json(fields)[:-1]},"memory":{"null" if join.memory is None else join.memory.text}}}'


@functools.lru_cache(maxsize=64)
def _order(order: Abort | Stop | GoOn | Probe | Over) -> str:
    return _json(vars(order))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)


def decode_from_worker(line: bytes) -> FromWorker:
    """Return the frame in a line of a worker.

    Raises:
        MessageError: the line is no frame of a worker.
    """
    return decoded(_FROM_WORKER, line)


def decode_from_coordinator(line: bytes) -> FromCoordinator:
    """Return the frame in a line of the coordinator.

    Raises:
        MessageError: the line is no frame of a coordinator.
    """
    return decoded(_FROM_COORDINATOR, line)


def decoded(adapter: TypeAdapter[T], line: bytes) -> T:
    """Return what a line of JSON holds.

    Args:
        adapter: of its type.
        line: the JSON.

    Raises:
        MessageError: it holds something else.
    """
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        # the values themselves stay out of the text: they may hold a token
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, problem["loc"]))
    raise MessageError(f"invalid message: {where + ': ' if where else ''}{problem['msg']}")
