"""Judge the links between neighbouring nodes: which are slow, and which node is at the end of most of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

NEIGHBOURS = 2
"""Each node tests its links to this many nodes that follow it in a ring, so it has up to twice as many links."""
LEAST_SLOW = 2
"""A node with fewer slow links is not left out: its peer may be to blame as well."""
LEAST_SECONDS = 0.005
"""A round trip is not slow unless it is longer than the usual one by this much: busy machines answer late."""


@dataclass(frozen=True)
class Link:
    """A measured link between two nodes."""

    source: str
    target: str
    seconds: float = 0.0
    """Shortest round trip."""
    bytes_per_second: float = 0.0
    """In the slower direction; 0.0 if nothing came through."""
    error: str = ""

    def better(self, other: Link) -> Link:
        """Return the better of two measurements of one link, property by property."""
        if self.error or other.error:
            return other if self.error else self
        return Link(self.source, self.target, min(self.seconds, other.seconds),
                    max(self.bytes_per_second, other.bytes_per_second))


@dataclass(frozen=True)
class Verdict:
    """What the links say."""

    slow: tuple[Link, ...]
    out: tuple[str, ...]
    """Nodes that are common to slow links, those with most of them first."""
    seconds: float
    """Usual round trip."""
    bytes_per_second: float
    """Usual rate."""

    def problem(self, node: str) -> str:
        """Return what is wrong with the links of a node that is left out; "" for others."""
        if node not in self.out:
            return ""
        peers = [f"{link.target if link.source == node else link.source} ({self.describe(link)})"
                 for link in self.slow if node in (link.source, link.target)]
        return f"its links are slow, to {', '.join(peers)}"

    def describe(self, link: Link) -> str:
        """Return the figures of a slow link beside the usual ones."""
        if link.error:
            return link.error
        return (f"{link.bytes_per_second / 1e6:.3g} MB/s and {link.seconds * 1e3:.3g} ms, usual are "
                f"{self.bytes_per_second / 1e6:.3g} MB/s and {self.seconds * 1e3:.3g} ms")


def neighbours(nodes: Sequence[str], new: Collection[str]) -> list[tuple[str, str]]:
    """Return the links to test, each once.

    Args:
        nodes: all nodes, in the order of the ring.
        new: only links with one of these are tested.
    """
    pairs: dict[frozenset[str], tuple[str, str]] = {}
    for index, node in enumerate(nodes):
        for step in range(1, NEIGHBOURS + 1):
            peer = nodes[(index + step) % len(nodes)]
            if peer != node and (node in new or peer in new):
                pairs.setdefault(frozenset((node, peer)), (node, peer))
    return list(pairs.values())


def judge(links: Iterable[Link], factor: float) -> Verdict:
    """Return which links are slow, and which nodes they have in common.

    What is usual is the median, over the nodes, of each one's best link: if one of three nodes is bad, two of the three
    links are. A slow link has less than the usual rate divided by `factor`, or a round trip longer than the usual one
    times `factor`. The node with the most slow links is left out, if it has at least two and they are more than half of
    its links. Then the rest is judged in the same way. Of two nodes that share one slow link, neither is left out.

    Args:
        links: all that were measured.
        factor: see above.
    """
    measured = list(links)
    rates: dict[str, float] = {}
    trips: dict[str, float] = {}
    for link in measured:
        for node in (link.source, link.target):
            rates[node] = max(rates.get(node, 0.0), link.bytes_per_second)
            if not link.error:
                trips[node] = min(trips.get(node, link.seconds), link.seconds)
    usual_rate = statistics.median(rates.values()) if rates else 0.0
    usual_seconds = statistics.median(trips.values()) if trips else 0.0
    longest = max(usual_seconds * factor, usual_seconds + LEAST_SECONDS)
    slow = [link for link in measured
            if link.error or link.bytes_per_second * factor < usual_rate or link.seconds > longest]
    return Verdict(tuple(slow), tuple(_common(measured, slow)), usual_seconds, usual_rate)


def _common(links: Sequence[Link], slow: Sequence[Link]) -> list[str]:
    """Return the nodes that most slow links have in common."""
    out: list[str] = []
    rest, bad = links, slow
    while True:
        total, num_bad = _counts(rest), _counts(bad)
        shares = {node: (count, count / total[node]) for node, count in num_bad.items()}
        worst = max(shares, key=lambda node: (shares[node], node), default="")
        if not worst or shares[worst][0] < LEAST_SLOW or shares[worst][1] <= 0.5:
            return out
        out.append(worst)
        rest = [link for link in rest if worst not in (link.source, link.target)]
        bad = [link for link in bad if worst not in (link.source, link.target)]


def _counts(links: Iterable[Link]) -> Counter[str]:
    """Return the number of links of each node."""
    return Counter(node for link in links for node in (link.source, link.target))
