"""What goes wrong in the demo: a node is killed at 40 % of the training, and another joins at 70 %."""

from __future__ import annotations

import threading
from typing import Any

from tidewheel.cluster.local import LocalCluster
from tidewheel.console import console

KILL_AT, JOIN_AT = 0.4, 0.65  # the node is up some seconds later


class Disturbance:
    """Watches a run's progress and disturbs its cluster, once each.

    Args:
        cluster: the cluster the run is on.
        steps: optimizer steps of the whole run.
    """

    def __init__(self, cluster: LocalCluster, steps: int) -> None:
        self._cluster, self._steps = cluster, steps
        self._killed = self._joined = False
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def on_progress(self, progress: dict[str, Any]) -> None:
        """Called with the run's progress; what takes time happens on a thread of its own."""
        done = (progress.get("step") or 0) / self._steps
        if done >= KILL_AT and not self._killed:
            self._killed = True
            self._start(self._kill)
        if done >= JOIN_AT and not self._joined:
            self._joined = True
            self._start(self._join)

    def finish(self) -> None:
        """Wait for what is under way; raise what went wrong on a thread."""
        for thread in self._threads:
            thread.join(timeout=60)
        if self.errors:
            raise self.errors[0]

    def _start(self, action: Any) -> None:
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
