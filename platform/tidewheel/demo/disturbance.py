"""The demo's disturbances: a node is killed at 40 % of the training, and another joins later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tidewheel.cluster.local import LocalCluster
from tidewheel.console import console

KILL_AT = 0.4
JOIN_AT = 0.65
"""Shares of all steps. The node is up some seconds after the second."""
JOIN_SECONDS = 60.0
"""A node joins at least this long before the end: a short demo would be over before its worker is up."""


class Disturbance:
    """Watch a run's progress and disturb its cluster, once each.

    Args:
        cluster: the cluster that the run uses.
        steps: optimizer steps of the whole run.
        clock: seconds since any moment.
    """

    def __init__(self, cluster: LocalCluster, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._steps = steps
        self._clock = clock
        self._killed_at: tuple[int, float] | None = None  # step and time of the kill
        self._joined = False
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def on_progress(self, progress: dict[str, Any]) -> None:
        """Kill or add a node once the run is far enough; both work in a thread of their own.

        Args:
            progress: the run's progress, as `fit` reports it.
        """
        step = progress.get("step") or 0
        if self._killed_at is None:
            if step >= KILL_AT * self._steps:
                self._killed_at = (step, self._clock())
                self._start(self._kill)
        elif not self._joined and (step >= JOIN_AT * self._steps or self._ends_soon(step)):
            self._joined = True
            self._start(self._join)

    def _ends_soon(self, step: int) -> bool:
        """Return whether the run ends within `JOIN_SECONDS` at its pace since the kill."""
        assert self._killed_at is not None
        killed_step, killed_time = self._killed_at
        done = step - killed_step
        if done < 1:
            return False
        seconds_per_step = (self._clock() - killed_time) / done
        return (self._steps - step) * seconds_per_step < JOIN_SECONDS

    def finish(self) -> None:
        """Wait for a kill or join that is under way.

        Raises:
            BaseException: the first error of one of the threads.
        """
        for thread in self._threads:
            thread.join(timeout=60)
        if self.errors:
            raise self.errors[0]

    def _start(self, action: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                action()
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=guarded, name=f"disturbance{action.__name__}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _kill(self) -> None:
        node = self._cluster.nodes[-1]
        killed = self._cluster.kill_node(node)
        console.print(f"  [red]✗[/] killed node {node.node_id[:8]}: SIGKILL to its raylet and {len(killed) - 1} "
                      "processes below it")

    def _join(self) -> None:
        node = self._cluster.add_node()
        console.print(f"  [green]✓[/] node {node.node_id[:8]} joined")
