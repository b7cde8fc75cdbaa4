"""The agent's answers to requests of workers, readers and other agents; see `protocol` for the messages' framing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tidewheel.checkpoint.memory_tier import link_probe
from tidewheel.checkpoint.memory_tier.part_store import Part
from tidewheel.checkpoint.memory_tier.protocol import Address, Connection
from tidewheel.checkpoint.memory_tier.slots import HEADER_BYTES, Content, block_range, num_blocks
from tidewheel.checkpoint.memory_tier.table import tensors_start
from tidewheel.checkpoint.memory_tier.worker_session import WorkerSession
from tidewheel.errors import CheckpointError

if TYPE_CHECKING:
    from tidewheel.checkpoint.memory_tier.agent import Agent

SKIP_BYTES = 1 << 20


def answer(agent: Agent, connection: Connection, message: dict[str, Any], worker: WorkerSession) -> None:
    """Carry out one request and send the answer; a request that cannot be carried out is answered with "problem".

    Args:
        agent: the agent that was asked.
        connection: the connection that the request came on.
        message: the request; "op" names it.
        worker: the state of this connection.

    Raises:
        OSError: the connection is broken.
    """
    try:
        _carry_out(agent, connection, message, worker)
    except CheckpointError as error:
        connection.send({"problem": str(error)})
    except (LookupError, TypeError, ValueError) as error:
        connection.send({"problem": f"{type(error).__name__}: {error}"})


def _carry_out(agent: Agent, connection: Connection, message: dict[str, Any], worker: WorkerSession) -> None:
    match message["op"]:
        case "inventory":
            if "generation" in message:
                agent.hear_of(int(message["generation"]))
            connection.send({"parts": _inventory(agent), "workers": agent.store.num_workers,
                             "generation": agent.generation, "uploads": bool(agent.orphan_upload.checkpoints),
                             **({} if agent.disk is None else {"damaged": list(agent.disk.damaged)})})
        case "describe":
            agent.add_reader(connection)
            _describe(connection, agent.store.part(message["part"]))
        case "read":
            _read(connection, agent.store.part(message["part"]), message)
        case "store":
            _store_replica(agent, connection, message)
        case "open":
            worker.open(message)
            connection.send({})
        case "slot":
            connection.send({"path": str(worker.slot(int(message["slot"])).path)})
        case "put":
            connection.send(worker.put(int(message["slot"]), disk=bool(message.get("disk"))))
        case "disk":
            connection.send({"busy": agent.disk is not None and agent.disk.busy(int(message["rank"]))})
        case "forget":
            agent.store.forget(rank=int(message["rank"]))
            if agent.disk is not None:
                agent.disk.discard()
            worker.forget(message)
            connection.send({})
        case "abandon":
            agent.orphan_upload.abandoned = True
            connection.send({})
        case "keep":
            if agent.is_orphaned(int(message["generation"])):
                agent.store.keep_only(int(message["of"]), int(message["step"]))
            connection.send({})
        case "ping":
            connection.send({})
        case "take":
            link_probe.take(connection, message)
        case "give":
            link_probe.give(connection, message)
        case "measure_link":
            host, port = message["address"]
            connection.send(_measure_link(Address(str(host), int(port)), agent.token))
        case "stop":
            connection.send({})
            agent.stop()
        case "release":
            connection.send({})
            if agent.is_orphaned(int(message["generation"])):
                agent.stop()
        case operation:
            raise ValueError(f"{operation!r} is not known")


def _measure_link(address: Address, token: str) -> dict[str, Any]:
    try:
        return dict(link_probe.measure(address, token))
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _inventory(agent: Agent) -> list[dict[str, Any]]:
    return [{"part": part.number, "origin": part.origin, "path": str(part.slot.path), "step": part.content.step,
             "generation": part.content.generation, "rank": part.content.rank,
             "world_size": part.content.world_size, "bytes": part.content.end,
             "shard": part.content.shard, "num_shards": part.content.num_shards}
            for part in agent.store.parts() if part.intact]


def _describe(connection: Connection, part: Part) -> None:
    """Send the table and `extra` of a part."""
    content, data = part.content, part.slot.bytes
    connection.send({"table_bytes": content.table_bytes, "table_hash": part.table_hash,
                     "extra_start": content.extra_start, "extra_bytes": content.extra_bytes,
                     "extra_hash": part.extra_hash},
                    data[HEADER_BYTES:HEADER_BYTES + content.table_bytes], data[content.extra_start:content.end])


def _read(connection: Connection, part: Part, message: dict[str, Any]) -> None:
    """Send the hashes of blocks "first" to "last" and, unless the reader maps the slot itself, their bytes."""
    first, last = int(message["first"]), int(message["last"])
    if not 0 <= first <= last < num_blocks(part.content.end):
        raise ValueError("blocks outside the part")
    start, stop = block_range(first, last, part.content.end)
    connection.send({"hashes": part.hashes[first:last + 1].tolist()},
                    *([part.slot.bytes[start:stop]] if message["bytes"] else ()))


def _store_replica(agent: Agent, connection: Connection, message: dict[str, Any]) -> None:
    """Receive a replica of another node's part; the previous one stays until this one is complete."""
    content = Content(**message["content"])
    if not tensors_start(content.table_bytes) <= content.extra_start <= content.end:
        raise ConnectionError("a part with impossible lengths")  # where its bytes end is unknown: hang up
    try:
        agent.hear_of(content.generation)
        slot = agent.store.replica_slot(content)
    except CheckpointError:
        _skip(connection, content)
        raise
    connection.receive_into(slot.bytes[HEADER_BYTES:content.end])
    hashes = np.frombuffer(connection.receive_bytes(8 * num_blocks(content.end)), np.uint64)
    slot.commit(content)
    agent.hold(slot, content, "copy", hashes)
    connection.send({})


def _skip(connection: Connection, content: Content) -> None:
    """Receive and discard the bytes of a replica that is refused."""
    left = content.end - HEADER_BYTES + 8 * num_blocks(content.end)
    while left:
        left -= len(connection.receive_bytes(min(left, SKIP_BYTES)))
