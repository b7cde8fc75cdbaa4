"""Messages between coordinator and workers survive encoding and decoding, and no other message is accepted."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields, replace
from typing import Any, get_args

import pytest

from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.elastic import messages
from tidewheel.elastic.messages import (
    Abort,
    AgentTable,
    Beat,
    End,
    ExitReason,
    FromCoordinator,
    FromWorker,
    GoOn,
    Hello,
    Here,
    Join,
    Leaving,
    Left,
    MemoryPlacement,
    MessageError,
    NodeHello,
    Over,
    Probe,
    Probed,
    Raise,
    Received,
    Return,
    StepDone,
    Stop,
    TakenOver,
    Welcome,
    WorkerEvent,
    decode_from_coordinator,
    decode_from_worker,
    encode,
)
from tidewheel.train.history import RunHistory

WORKER = [
    Hello("a", "node", "token"),
    Hello("a", "node", "token", spot=True, device="0,1"),
    NodeHello("node", "token"),
    Return("a", "token", "session"),
    Here(),
    Beat(3, 7, 1.25, 2),
    StepDone(3, 7, 10, {"loss": 2.5, "tokens": 1 << 60, "domains": {"web": [1, None, True]}}),
    WorkerEvent("save", {"step": 7, "text": 'quotes "\n and ü'}, 1.5),
    Leaving(),
    Left(3, ExitReason.FINISHED),
    Left(3, ExitReason.PREEMPTED, saved_step=7),
    Left(3, ExitReason.FAILED, "HangError: rank 1", "", (1, 5)),
    Left(3, ExitReason.FATAL, "ValueError: wrong", "ValueError"),
    Probed(""),
]
TABLE = AgentTable((Address("h1", 1), Address("h2", 2)), {"rack": (0,)}, "secret")
MEMORY = MemoryPlacement(TABLE, ((0, 1, 4),), (1,))
COORDINATOR = [
    Welcome("session"),
    End(),
    Received(),
    Join(3, 0, 4),
    Join(3, 0, 4, ("host", 29400), MEMORY, RunHistory(7, 1, 2, 1.5)),
    Join(3, 0, 4, ("host", 29400), replace(MEMORY, agents=None), None, 0.5),
    Abort(3),
    Stop(3),
    Stop(3, save=True),
    GoOn(3),
    Probe(),
    Raise("too few workers"),
    TakenOver("the run was taken over"),
    Over(),
]


def kinds(frame: Any) -> set[type]:
    annotation = frame.__annotations__["body"]
    union, _ = get_args(eval(annotation, vars(messages)))
    return set(get_args(union))


def test_every_message_is_covered_here():
    assert {type(message) for message in WORKER} == kinds(FromWorker)
    assert {type(message) for message in COORDINATOR} == kinds(FromCoordinator)


@pytest.mark.parametrize("message", WORKER, ids=lambda message: message.type)
@pytest.mark.parametrize(("number", "received"), [(None, 0), (5, 3)])
def test_a_message_of_a_worker_is_decoded_as_it_was(message, number, received):
    line = encode(FromWorker(message, number, received))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_from_worker(line) == FromWorker(message, number, received)


@pytest.mark.parametrize("message", COORDINATOR, ids=lambda message: message.type)
@pytest.mark.parametrize(("number", "received"), [(None, 0), (5, 3)])
def test_a_message_of_the_coordinator_is_decoded_as_it_was(message, number, received):
    assert decode_from_coordinator(encode(FromCoordinator(message, number, received))) == (
        FromCoordinator(message, number, received))


@pytest.mark.parametrize("message", WORKER, ids=lambda message: message.type)
def test_a_worker_refuses_messages_of_workers(message):
    with pytest.raises(MessageError, match="does not match any of the expected tags"):
        decode_from_coordinator(encode(FromWorker(message)))


@pytest.mark.parametrize("message", COORDINATOR, ids=lambda message: message.type)
def test_the_coordinator_refuses_messages_of_coordinators(message):
    with pytest.raises(MessageError, match="does not match any of the expected tags"):
        decode_from_worker(encode(FromCoordinator(message)))


def damaged(message: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return message bodies, each with one fault, and what the fault is."""
    body = json.loads(encode(FromWorker(message)))["body"]
    bodies = [("one field more", {**body, "more": 1}), ("unknown type", {**body, "type": "nothing"}),
              ("no type", {name: value for name, value in body.items() if name != "type"})]
    for field in fields(message):
        if field.name == "type":
            continue
        bodies.append((f"{field.name} of another type", {**body, field.name: {"no": "value"} if not isinstance(
            body[field.name], dict) else 3}))
        if field.default is MISSING and field.default_factory is MISSING:
            bodies.append((f"no {field.name}", {name: value for name, value in body.items() if name != field.name}))
    return bodies


@pytest.mark.parametrize("message", [*WORKER, *COORDINATOR], ids=lambda message: message.type)
def test_a_damaged_message_is_refused(message):
    decode = decode_from_worker if message in WORKER else decode_from_coordinator
    for damage, body in damaged(message):
        with pytest.raises(MessageError):
            print(damage, decode(json.dumps({"body": body}).encode()))


@pytest.mark.parametrize("line", [
    b"", b"\n", b"null", b"3", b"[]", b"{}", b"no json", b"\xff\xfe", b"[" * 100_000, b'{"body": ' + b"[" * 100_000,
    b'{"body": {}}', b'{"body": null}', b'{"body": {"type": "leaving"}, "more": 1}',
    b'{"body": {"type": "leaving"}, "number": "5"}', b'{"body": {"type": "leaving"}, "received": null}',
    b'{"body": {"type": "beat", "generation": 1' + b"0" * 5000 + b', "step": 0}}',
    b'{"body": {"type": "beat", "generation": true, "step": 0}}',
    b'{"body": {"type": "beat", "generation": 1.0, "step": 0}}',
    b'{"body": {"type": "beat", "generation": "1", "step": 0}}',
    b'{"body": {"type": "left", "generation": 1, "reason": "bored"}}',
], ids=range(20))
def test_other_lines_are_refused(line):
    with pytest.raises(MessageError, match="invalid message"):
        decode_from_worker(line)


def test_nested_fields_are_checked_too():
    body = json.loads(encode(FromCoordinator(Join(3, 0, 4, memory=MEMORY, past=RunHistory(7)))))["body"]
    for part in ("memory", "past"):
        with pytest.raises(MessageError, match="more"):
            decode_from_coordinator(json.dumps({"body": {**body, part: {**body[part], "more": 1}}}).encode())
    body["memory"]["agents"] = [["host", "port"]]
    with pytest.raises(MessageError, match=r"memory\.agents"):
        decode_from_coordinator(json.dumps({"body": body}).encode())


def test_an_error_does_not_show_the_values_of_a_message():
    line = json.dumps({"body": {"type": "hello", "name": 3, "node": "n", "token": "a secret"}}).encode()
    with pytest.raises(MessageError) as caught:
        decode_from_worker(line)
    assert str(caught.value) == "invalid message: body.hello.name: Input should be a valid string"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "secret" not in repr(Hello("a", "n", "a secret"))
    assert "secret" not in repr(Join(0, 0, 1, memory=MEMORY))


def test_nan_and_infinity_are_decoded_as_they_were():
    sent = StepDone(0, 1, 2, {"loss": math.nan, "gradient_norm": math.inf})
    [metrics] = [decode_from_worker(encode(FromWorker(sent))).body.metrics]
    assert math.isnan(metrics["loss"])
    assert metrics["gradient_norm"] == math.inf


def test_undecodable_text_does_not_make_a_message_invalid():
    """An error may name a file whose name is not UTF-8."""
    sent = Left(0, ExitReason.FAILED, "cannot read caf\udce9.txt")
    assert decode_from_worker(encode(FromWorker(sent))).body == Left(0, ExitReason.FAILED, "cannot read caf?.txt")


def test_values_that_json_has_no_type_for_are_sent_as_text():
    sent = WorkerEvent("save", {"reason": ExitReason.FAILED, "error": ValueError("wrong")}, 0.0)
    body = decode_from_worker(encode(FromWorker(sent))).body
    assert body.detail == {"reason": "failed", "error": "wrong"}
