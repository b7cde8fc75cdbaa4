"""Decide which nodes a run leaves out because they failed again and again, in this run or earlier ones.

A node is left out only if the run is nearly as large without it. Otherwise it is better than none.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tidewheel import storage
from tidewheel.cluster.node_history import NodeFailure, NodeHistory, by_host, read
from tidewheel.elastic.generation import Outbox, Worker
from tidewheel.elastic.layout import largest_fit
from tidewheel.errors import StorageError
from tidewheel.train.node_checks_config import NodeChecksConfig

logger = logging.getLogger(__name__)

MANY_NODES = 0.1
"""If more than this share of a generation's nodes is lost at once, and more than one, no single node is to blame."""


class NodeHealth:
    """Knows the failures of nodes.

    Args:
        settings: how many failures are too many.
        outbox: receives events.
        past: failures in earlier runs, or before this driver started.
        history: keeps the failures; None to forget them.
        hosts: host of each node; a node without one is its own.
        clock: returns Unix seconds.
    """

    def __init__(self, settings: NodeChecksConfig, outbox: Outbox, past: Iterable[NodeFailure] = (), *,
                 history: NodeHistory | None = None, hosts: Mapping[str, str] | None = None,
                 clock: Callable[[], float] = time.time) -> None:
        self._settings, self._outbox, self._history = settings, outbox, history
        self._failures = list(past)
        self._hosts: Mapping[str, str] = hosts if hosts is not None else {}
        self._clock = clock
        self._out: set[str] = set()

    def lost(self, nodes: Sequence[str], excused: Collection[str], members: Iterable[str], text: str) -> None:
        """Note that workers of a generation were lost.

        Args:
            nodes: their nodes.
            excused: nodes that were about to leave, or that may be taken away at any time.
            members: the nodes of all members.
            text: the reason.
        """
        lost = set(nodes)
        if len(lost) > max(1.0, MANY_NODES * len(set(members))):
            return
        for node in sorted(lost - set(excused)):
            self.failed(node, text)

    def failed(self, node: str, text: str) -> None:
        """Note a failure that a node is to blame for.

        Args:
            node: its id.
            text: the error.
        """
        host = self._host(node)
        if self._history is not None:
            self._failures.append(self._history.append(host, text, self._clock()))
        else:
            self._failures.append(NodeFailure(self._clock(), host, "", text))

    def usable(self, workers: Sequence[Worker], sizes: Collection[int], largest: int) -> list[Worker]:
        """Return the workers of nodes that are not left out.

        Args:
            workers: that can take a rank.
            sizes: legal numbers of workers.
            largest: number of workers in the largest generation so far.
        """
        suspects = self._suspects()
        if not suspects and not self._out:
            return list(workers)
        counts = Counter(self._host(worker.node) for worker in workers)
        out = self._left_out(suspects, counts, sizes, largest)
        self._note(out, suspects)
        return [worker for worker in workers if self._host(worker.node) not in out]

    def doubts(self, nodes: Iterable[str]) -> bool:
        """Return whether one of the nodes would be left out if others took its place."""
        suspects = self._suspects()
        return bool(suspects) and any(self._host(node) in suspects for node in nodes)

    def avoid(self, slots: Mapping[str, int], sizes: Collection[int]) -> set[str]:
        """Return the nodes on which no worker shall be started.

        Args:
            slots: number of workers for which each node has room.
            sizes: legal numbers of workers.
        """
        suspects = self._suspects()
        if not suspects:
            return set()
        counts: Counter[str] = Counter()
        for node, count in slots.items():
            counts[self._host(node)] += count
        out = self._left_out(suspects, counts, sizes, 0)
        return {node for node in slots if self._host(node) in out}

    def _host(self, node: str) -> str:
        return self._hosts.get(node, node)

    def _left_out(self, suspects: Mapping[str, Sequence[NodeFailure]], counts: Mapping[str, int],
                  sizes: Collection[int], largest: int) -> set[str]:
        """Return the hosts without which the run is nearly as large, those with most failures first."""
        left = sum(counts.values())
        least = max(1.0, (1 - self._settings.give_up_share) * max(largest, largest_fit(sizes, left)))
        out: set[str] = set()
        for host in sorted(suspects, key=lambda host: (-len(suspects[host]), host)):
            without = left - counts.get(host, 0)
            if counts.get(host) and largest_fit(sizes, without) >= least:
                left = without
                out.add(host)
        return out

    def _suspects(self) -> dict[str, list[NodeFailure]]:
        """Return the failures of the nodes whose time is not over, by host."""
        settings, now = self._settings, self._clock()
        if not self._failures or not settings.failures:
            return {}
        records = by_host(self._failures, now - settings.within_seconds)
        return {host: list(record.failures) for host, record in records.items()
                if record.excluded_until(settings.failures, settings.exclude_seconds) > now}

    def _note(self, out: set[str], suspects: dict[str, list[NodeFailure]]) -> None:
        """Record which nodes are left out from now on, and which are used again."""
        for host in sorted(out - self._out):
            failures = suspects[host]
            runs = len({failure.run for failure in failures})
            until = by_host(failures, 0.0)[host].excluded_until(self._settings.failures, self._settings.exclude_seconds)
            self._outbox.event("node_excluded", {
                "host": host, "failures": len(failures), "runs": runs, "until": until, "reason": failures[-1].text})
        for host in sorted(self._out - out):
            reason = "too few workers without it" if host in suspects else "its time is over"
            self._outbox.event("node_used_again", {"host": host, "reason": reason})
        self._out = out


def past_failures(folder: str, settings: NodeChecksConfig) -> list[NodeFailure]:
    """Return the failures of nodes in earlier runs; [] without a folder, or if storage cannot be read.

    Args:
        folder: what the runs share; "" for none.
        settings: how long failures count.
    """
    if not folder:
        return []
    try:
        return read(storage.store(folder), time.time() - settings.within_seconds)
    except (StorageError, OSError) as error:  # it only helps
        logger.warning("the history of the nodes cannot be read: %s", error)
        return []


def clock_problem(clock: float, since: float, settings: NodeChecksConfig) -> str:
    """Return what is wrong with a worker's clock, or "".

    Args:
        clock: its Unix time; 0: unknown.
        since: Unix time since which it may have read its clock.
        settings: how far it may be off.
    """
    limit = settings.clock_seconds
    if not limit or not clock or since - limit <= clock <= time.time() + limit:
        return ""
    off = clock - time.time()
    return f"its clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the driver's"
