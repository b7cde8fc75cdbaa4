"""Every node of a Ray cluster: each examined by itself, then what they must agree on: versions, clocks, GPUs, and that
their processes can reach each other on ports of their own, as gloo and NCCL do."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from platform import python_version
from typing import Any, Protocol

from tidewheel.cluster.doctor.check import Check
from tidewheel.cluster.doctor.examine import diagnose

ANSWER_SECONDS = 120.0
CONNECT_SECONDS = 5.0
CLOCK_ROUNDS = 8
SKEW_WARNING, SKEW_FAILURE = 0.5, 30.0
"""Seconds between the clocks of two nodes: drain deadlines and leases are told in wall-clock time."""
SAME = ("python", "ray", "torch", "tidewheel")


@dataclass(frozen=True)
class Node:
    """One node and what was found there."""

    name: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Question:
    """A method of an `Examiner`, and what to give it."""

    method: str
    arguments: tuple[Any, ...] = ()
    to: str = ""
    """Name of the node to ask; default: the name under which it is asked."""


class Examiner:
    """Runs on the node that it examines, which has this address."""

    def __init__(self, address: str = "") -> None:
        self.address = address

    def examine(self, storage: str | None) -> list[Check]:
        return diagnose(storage, in_cluster=True)

    def versions(self) -> dict[str, str]:
        found = {"python": python_version()}
        for package in SAME[1:]:
            with suppress(metadata.PackageNotFoundError):
                found[package] = metadata.version(package)
        return found

    def clock(self) -> float:
        return time.time()

    def listen(self, token: str) -> tuple[str, int]:
        """Wait for one connection that shows `token`, at this node's own address, on a port that is free."""
        server = socket.create_server((self.address, 0))
        server.settimeout(ANSWER_SECONDS)
        threading.Thread(target=_answer_one, args=(server, token.encode()), daemon=True).start()
        return self.address, server.getsockname()[1]

    def reach(self, address: str, port: int, token: str) -> str:
        """"" if the other node answers, else why not."""
        try:
            with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as link:
                link.sendall(token.encode())
                return "" if link.recv(2) == b"ok" else "it answers, but not as it should"
        except OSError as error:
            return str(error)


def _answer_one(server: socket.socket, token: bytes) -> None:
    with server, suppress(OSError):
        link, _ = server.accept()
        with link:
            link.settimeout(CONNECT_SECONDS)
            shown = b""
            while len(shown) < len(token) and (more := link.recv(len(token))):
                shown += more
            if secrets.compare_digest(shown, token):
                link.sendall(b"ok")


class Asking(Protocol):
    """How to reach the examiners."""

    def __call__(self, questions: Mapping[str, Question]) -> tuple[dict[str, Any], dict[str, str]]:
        """Answers of the examiners that are asked, side by side, by name; and why the others gave none."""


def examine(names: Sequence[str], ask: Asking, storage: str | None = None) -> list[Node]:
    """Every node, then one entry for all of them together."""
    versions, silent = ask({name: Question("versions") for name in names})
    alive = [name for name in names if name in versions]
    skew = clocks(alive, ask)  # before the nodes are busy
    between = connections(alive, ask)
    found, lost = ask({name: Question("examine", (storage,)) for name in alive})
    nodes = [Node(name, tuple(checks)) for name, checks in found.items()]
    nodes += [Node(name, (Check("node", "failure", why, "see its raylet's log; tidewheel must be installed there, or "
                                "be in the runtime environment"),)) for name, why in {**silent, **lost}.items()]
    return [*sorted(nodes, key=lambda node: node.name),
            Node("all nodes", (*same_versions(versions), clock_check(skew), between))]


def diagnose_cluster(storage: str | None = None) -> list[Node]:
    """Every living node of the Ray cluster that this process is connected to: see `examine`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    rows = sorted((row["NodeManagerAddress"], row["NodeID"]) for row in ray.nodes() if row["Alive"])
    examiner: Any = ray.remote(Examiner)
    actors = {}
    for address, node_id in rows:
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        made = examiner.options(num_cpus=0, max_concurrency=2, scheduling_strategy=there)
        actors[f"{address} {node_id[:8]}"] = made.remote(address)

    def ask(questions: Mapping[str, Question]) -> tuple[dict[str, Any], dict[str, str]]:
        asked = {name: getattr(actors[question.to or name], question.method).remote(*question.arguments)
                 for name, question in questions.items()}
        answers: dict[str, Any] = {}
        silent: dict[str, str] = {}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_SECONDS)
        for name, reference in asked.items():
            try:
                answers[name] = ray.get(reference, timeout=0)
            except ray.exceptions.GetTimeoutError:
                silent[name] = f"did not answer within {ANSWER_SECONDS:.0f} s"
            except ray.exceptions.RayError as error:
                silent[name] = str(error).strip().splitlines()[-1][:300]
        return answers, silent

    try:
        return examine(list(actors), ask, storage)
    finally:
        for actor in actors.values():
            ray.kill(actor)


def clocks(names: Sequence[str], ask: Asking) -> dict[str, tuple[float, float]]:
    """(seconds ahead of this process's clock, uncertainty) of each node that answers.

    As NTP does it (RFC 5905): the answer is taken to be from the middle of the quickest of several round trips, and is
    wrong by half of that at most.
    """
    found = {}
    for name in names:
        rounds = []
        for _ in range(CLOCK_ROUNDS):
            asked, began = time.time(), time.monotonic()
            told, _ = ask({name: Question("clock")})
            took = time.monotonic() - began
            if name in told:
                rounds.append((took / 2, told[name] - asked - took / 2))
        if rounds:
            uncertain, ahead = min(rounds)
            found[name] = ahead, uncertain
    return found


def clock_check(skew: Mapping[str, tuple[float, float]]) -> Check:
    """The two clocks that are furthest apart; what may be the measurement's own error does not count."""
    if len(skew) < 2:
        return Check("clocks", "ok", "one node")
    late, early = min(skew.items(), key=lambda item: item[1]), max(skew.items(), key=lambda item: item[1])
    apart, uncertain = early[1][0] - late[1][0], early[1][1] + late[1][1]
    detail = f"at most {1000 * apart:.0f} ms apart, measured to {1000 * uncertain:.0f} ms"
    if apart - uncertain <= SKEW_WARNING:
        return Check("clocks", "ok", detail)
    status: Any = "failure" if apart - uncertain > SKEW_FAILURE else "warning"
    return Check("clocks", status, f"{early[0]} is {apart:.1f} s ahead of {late[0]}",
                 "synchronise them (chrony or ntp): drain deadlines and leases are in wall-clock time")


def same_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Check]:
    """Python, Ray, torch and Tidewheel, which must be the same everywhere: Ray pickles between them."""
    found = []
    for package in SAME:
        by_version: dict[str, list[str]] = {}
        for name, each in versions.items():
            by_version.setdefault(each.get(package, "missing"), []).append(name)
        if len(by_version) > 1:
            detail = "; ".join(f"{version} on {', '.join(names)}" for version, names in sorted(by_version.items()))
            found.append(Check(f"same {package}", "failure", detail, "use one image, or one environment, on all nodes"))
    if not found and versions:
        same = ", ".join(f"{name} {version}" for name, version in next(iter(versions.values())).items())
        found.append(Check("same versions", "ok", f"{len(versions)} nodes: {same}"))
    return found


def connections(names: Sequence[str], ask: Asking) -> Check:
    """Each node reaches the next on a port that was not fixed beforehand: a ring, so that 1,000 nodes are 1,000
    tries."""
    if len(names) < 2:
        return Check("between nodes", "ok", "one node")
    token = secrets.token_hex(16)
    places, silent = ask({name: Question("listen", (token,)) for name in names})
    pairs = [(name, names[(at + 1) % len(names)]) for at, name in enumerate(names)]
    tried, lost = ask({f"{one} to {other}": Question("reach", (*places[other], token), to=one)
                       for one, other in pairs if other in places})
    problems = {**silent, **lost, **{pair: why for pair, why in tried.items() if why}}
    if problems:
        return Check("between nodes", "failure", "; ".join(f"{pair}: {why}" for pair, why in problems.items())[:600],
                     "let the nodes reach each other on all ports (security group, NetworkPolicy): gloo and NCCL "
                     "choose theirs")
    return Check("between nodes", "ok", f"{len(tried)} connections on free ports")


def flat(nodes: Sequence[Node]) -> list[dict[str, str]]:
    """One row for each finding, for JSON."""
    return [{"node": node.name, **vars(check)} for node in nodes for check in node.checks]
