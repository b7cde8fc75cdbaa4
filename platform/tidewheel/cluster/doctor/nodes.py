"""Examine every node of a Ray cluster, and what the nodes must agree on: versions, clocks, and free connections.

gloo and NCCL choose their ports, so every node must reach the others on any port.
"""

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
"""Seconds between the clocks of two nodes: drain deadlines and leases are in wall-clock time."""
SAME = ("python", "ray", "torch", "tidewheel")


@dataclass(frozen=True)
class Node:
    """A node and its findings."""

    name: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Question:
    """A call of a method of `Examiner`."""

    method: str
    arguments: tuple[Any, ...] = ()
    to: str = ""
    """Name of the node to ask; by default the name of the question."""


class Examiner:
    """Actor that runs on the node that it examines.

    Args:
        address: the node's address.
    """

    def __init__(self, address: str = "") -> None:
        self.address = address

    def examine(self, storage: str | None) -> list[Check]:
        """Examine the node; see `examine.diagnose`."""
        return diagnose(storage, in_cluster=True)

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages in SAME that are installed."""
        installed = {"python": python_version()}
        for package in SAME[1:]:
            with suppress(metadata.PackageNotFoundError):
                installed[package] = metadata.version(package)
        return installed

    def clock(self) -> float:
        """Return the node's time, in seconds since 1970."""
        return time.time()

    def listen(self, token: str) -> tuple[str, int]:
        """Listen for one connection that shows `token`; return this node's address and a free port."""
        server = socket.create_server((self.address, 0))
        server.settimeout(ANSWER_SECONDS)
        threading.Thread(target=_answer_one, args=(server, token.encode()), daemon=True).start()
        return self.address, server.getsockname()[1]

    def reach(self, address: str, port: int, token: str) -> str:
        """Connect to another node; return "" if it answers, else the reason.

        Args:
            address: address of the other node.
            port: port on which it listens.
            token: text that it expects.
        """
        try:
            with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as link:
                link.sendall(token.encode())
                return "" if link.recv(2) == b"ok" else "another program answers"
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
    """A function that asks the examiners of all nodes."""

    def __call__(self, questions: Mapping[str, Question]) -> tuple[dict[str, Any], dict[str, str]]:
        """Ask all questions at once; return the answers by name, and the reason for each missing answer."""


def examine(names: Sequence[str], ask: Asking, storage: str | None = None) -> list[Node]:
    """Return the findings of every node, then those about all of them together.

    Args:
        names: names of the nodes.
        ask: asks their examiners.
        storage: URI that each node tries; None to leave storage out.
    """
    versions, silent = ask({name: Question("versions") for name in names})
    alive = [name for name in names if name in versions]
    skew = clocks(alive, ask)  # before the nodes are busy
    between = connections(alive, ask)
    findings, lost = ask({name: Question("examine", (storage,)) for name in alive})
    nodes = [Node(name, tuple(checks)) for name, checks in findings.items()]
    nodes += [Node(name, (Check("node", "failure", why, "see its raylet's log; Tidewheel must be installed there, or "
                                "be in the runtime environment"),)) for name, why in {**silent, **lost}.items()]
    return [*sorted(nodes, key=lambda node: node.name),
            Node("all nodes", (*same_versions(versions), clock_check(skew), between))]


def diagnose_cluster(storage: str | None = None) -> list[Node]:
    """Examine every living node of the Ray cluster to which this process is connected; see `examine`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    rows = sorted((row["NodeManagerAddress"], row["NodeID"]) for row in ray.nodes() if row["Alive"])
    examiner: Any = ray.remote(Examiner)
    actors = {}
    for address, node_id in rows:
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        made = examiner.options(num_cpus=0, max_concurrency=2, scheduling_strategy=on_node)
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
    """Measure the clock of each node; return the seconds that it is ahead of this process's, and the uncertainty.

    As in NTP (RFC 5905), an answer counts as given in the middle of the quickest of several round trips, so its error
    is at most half of that round trip.
    """
    skew = {}
    for name in names:
        rounds = []
        for _ in range(CLOCK_ROUNDS):
            asked_at = time.time()
            began = time.monotonic()
            answers, _ = ask({name: Question("clock")})
            round_trip = time.monotonic() - began
            if name in answers:
                rounds.append((round_trip / 2, answers[name] - asked_at - round_trip / 2))
        if rounds:
            uncertain, ahead = min(rounds)
            skew[name] = ahead, uncertain
    return skew


def clock_check(skew: Mapping[str, tuple[float, float]]) -> Check:
    """Judge the two clocks that are furthest apart, less the uncertainty of the measurement."""
    if len(skew) < 2:
        return Check("clocks", "ok", "one node")
    late = min(skew.items(), key=lambda item: item[1])
    early = max(skew.items(), key=lambda item: item[1])
    apart = early[1][0] - late[1][0]
    uncertain = early[1][1] + late[1][1]
    detail = f"at most {1000 * apart:.0f} ms apart, measured to {1000 * uncertain:.0f} ms"
    if apart - uncertain <= SKEW_WARNING:
        return Check("clocks", "ok", detail)
    status: Any = "failure" if apart - uncertain > SKEW_FAILURE else "warning"
    return Check("clocks", status, f"{early[0]} is {apart:.1f} s ahead of {late[0]}",
                 "synchronise them (chrony or ntp): drain deadlines and leases are in wall-clock time")


def same_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Check]:
    """Check that all nodes have the same Python, Ray, torch and Tidewheel: Ray pickles between them."""
    checks = []
    for package in SAME:
        by_version: dict[str, list[str]] = {}
        for name, installed in versions.items():
            by_version.setdefault(installed.get(package, "missing"), []).append(name)
        if len(by_version) > 1:
            detail = "; ".join(f"{version} on {', '.join(names)}" for version, names in sorted(by_version.items()))
            checks.append(Check(f"same {package}", "failure", detail,
                                "use one image, or one environment, on all nodes"))
    if not checks and versions:
        same = ", ".join(f"{name} {version}" for name, version in next(iter(versions.values())).items())
        checks.append(Check("same versions", "ok", f"{len(versions)} nodes: {same}"))
    return checks


def connections(names: Sequence[str], ask: Asking) -> Check:
    """Check that each node reaches the next one, in a ring, on a port chosen at random."""
    if len(names) < 2:
        return Check("between nodes", "ok", "one node")
    token = secrets.token_hex(16)
    listeners, silent = ask({name: Question("listen", (token,)) for name in names})
    pairs = [(name, names[(at + 1) % len(names)]) for at, name in enumerate(names)]
    tried, lost = ask({f"{one} to {other}": Question("reach", (*listeners[other], token), to=one)
                       for one, other in pairs if other in listeners})
    problems = {**silent, **lost, **{pair: why for pair, why in tried.items() if why}}
    if problems:
        return Check("between nodes", "failure", "; ".join(f"{pair}: {why}" for pair, why in problems.items())[:600],
                     "let the nodes reach each other on all ports (security group, NetworkPolicy): gloo and NCCL "
                     "choose theirs")
    return Check("between nodes", "ok", f"{len(tried)} connections on free ports")


def flat(nodes: Sequence[Node]) -> list[dict[str, str]]:
    """Return the findings as rows, for JSON."""
    return [{"node": node.name, **vars(check)} for node in nodes for check in node.checks]
