"""Measure the control plane of a run over the number of workers: from a death until the last survivor joins again.

    python -m tests.benchmarks.control_plane [--workers 64 256 1000] [--deaths 1 10 100] [--beat SECONDS] [--relays]

The coordinator is the real one, with its membership, server, events and memory placement, in this process. Workers are
connections that speak the real protocol (`control_plane_clients`), eight on a node, in other processes on the same
machine, so that the seconds are those of both: the CPU time of each is a column. With `--relays` the eight share a
connection, and what is emulated is what a node's relay sends and receives, without its own work. A worker that dies
closes its connection; a node that dies closes the relay's; a frozen worker stays silent. The exit
code is 1 when a survivor is cut off, when ranks are wrong, or when a generation takes more than its limit of seconds.
"""

from __future__ import annotations

import argparse
import json
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.agent_addresses import AgentAddresses
from tidewheel import storage
from tidewheel.console import print_table
from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.ownership import acquire
from tidewheel.train.elastic_config import ElasticConfig
from tidewheel.train.node_checks_config import NodeChecksConfig

PROCESSES = 4
RANKS_A_NODE = 8

WAIT_SECONDS = 100.0
SETTLE_SECONDS = 2.0
STEADY_SECONDS = 5.0


class MeasuredCoordinator(Coordinator):
    """The coordinator, without Ray, that notes when it learns of losses."""

    def __init__(self, run_uri: str, workers: int, *, elastic: ElasticConfig | None = None,
                 sizes: tuple[int, ...] = ()) -> None:
        owned = acquire(storage.store(run_uri))  # else the coordinator finds out that the run is not its own
        super().__init__(run_uri, elastic or ElasticConfig(min_workers=1, max_workers=workers),
                         sizes or tuple(range(1, workers + 1)), epoch=owned.epoch)
        self._agents.supervisor = AgentSupervisor(AgentAddresses())  # type: ignore[arg-type]
        self.learnt: dict[str, float] = {}
        """When each worker was found to be lost, in monotonic seconds."""
        dispatcher = self._dispatcher
        dispatcher.closed = self._noting(dispatcher.closed)  # type: ignore[method-assign, assignment]
        dispatcher.fence = self._noting(dispatcher.fence)  # type: ignore[method-assign, assignment]

    def _noting(self, function: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that notes the loss of a worker before it calls `function`."""
        def noting(worker: str) -> None:
            self.learnt.setdefault(worker, time.monotonic())
            function(worker)

        return noting

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the thread that serves the workers."""
        return self._decide(time.thread_time)

    def connected(self) -> int:
        """Return the number of workers that have said hello."""
        return sum(worker.connected for worker in self._membership.workers.values())

    def _watch(self) -> None:
        self._ended.wait()


class Swarm:
    """The processes that hold the workers' connections.

    Args:
        coordinator: where they connect.
        workers: number of workers.
        beat: seconds between two beats of a worker; 0 for the product's.
        relays: the workers of a node share a connection.
        spread: seconds over which the reports of a generation's members are spread.
    """

    def __init__(self, coordinator: MeasuredCoordinator, workers: int, beat: float, relays: bool,
                 spread: float = 0.0) -> None:
        self._coordinator = coordinator
        self.names = {f"w{index:05d}": f"n{index // RANKS_A_NODE:05d}" for index in range(workers)}
        coordinator.expect(self.names, anew=True)
        endpoint = coordinator.endpoint()
        self._reports: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._processes = []
        relay = ["--relays"] if relays else []
        for number in range(PROCESSES):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.control_plane_clients", endpoint.address[0],
                 str(endpoint.address[1]), "--beat", str(beat), "--spread", str(spread), *relay],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            mine = {name: node for name, node in self.names.items() if int(node[1:]) % PROCESSES == number}
            self._tell(process, {"token": endpoint.token, "names": mine})
            threading.Thread(target=self._read, args=(number, process), daemon=True).start()

    def order(self, command: dict[str, Any]) -> None:
        """Send a command to all processes."""
        for process in self._processes:
            self._tell(process, command)

    def formed(self, size: int) -> tuple[int, float]:
        """Wait until `size` workers have joined one generation; return its number and when the last one joined.

        Raises:
            RuntimeError: they have not within `WAIT_SECONDS`, or their ranks are not 0 to `size` - 1.
        """
        rounds: dict[int, dict[int, dict[str, Any]]] = {}
        until = time.monotonic() + WAIT_SECONDS
        while True:
            number, report = self._next(until)
            if "joined" not in report:
                continue
            parts = rounds.setdefault(report["joined"], {})
            parts[number] = report
            if report["world_size"] == size and sum(part["ranks"] for part in parts.values()) == size:
                if sum(part["sum"] for part in parts.values()) != size * (size - 1) // 2:
                    raise RuntimeError(f"generation {report['joined']}: the ranks are not 0 to {size - 1}")
                return report["joined"], max(part["at"] for part in parts.values())

    def totals(self) -> dict[str, Any]:
        """Return what all workers together have received."""
        self.order({"report": True})
        sums: dict[str, Any] = {}
        answers = 0
        while answers < PROCESSES:
            _, report = self._next(time.monotonic() + WAIT_SECONDS)
            if "report" in report:
                answers += 1
                for key, value in report["report"].items():
                    sums[key] = sums.get(key, 0) + value
        return sums

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _next(self, until: float) -> tuple[int, dict[str, Any]]:
        try:
            return self._reports.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise RuntimeError(f"the workers did not report within {WAIT_SECONDS:g} s; {self._coordinator.snapshot()}, "
                               f"connected: {self._coordinator.connected()}") from None

    def _read(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._reports.put((number, json.loads(line)))

    @staticmethod
    def _tell(process: subprocess.Popen[str], command: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()


class Measurement:
    """One number of workers: start, steady beats, deaths and a freeze.

    Args:
        workers: their number.
        beat: seconds between two beats; 0 for the product's.
        relays: the workers of a node share a connection.
        heartbeat: seconds after which a silent worker is lost.
        leave: seconds within which a survivor leaves a broken generation.
        spread: seconds over which the reports of a generation's members are spread.
    """

    def __init__(self, workers: int, beat: float, *, relays: bool = False, heartbeat: float = 3.0,
                 leave: float = 5.0, spread: float = 0.0) -> None:
        self.problems: list[str] = []
        self._workers = workers
        self._coordinator = MeasuredCoordinator(tempfile.mkdtemp(), workers, elastic=ElasticConfig(
            max_workers=workers, heartbeat_seconds=heartbeat, leave_seconds=leave,
            node_checks=NodeChecksConfig(failures=0)))  # deaths follow each other on one node, which stays in use
        self._coordinator.start("127.0.0.1")
        began = time.monotonic()
        before = self._coordinator.cpu_seconds()
        self._swarm = Swarm(self._coordinator, workers, beat, relays, spread)
        self._alive = list(self._swarm.names)
        self._generation, last = self._swarm.formed(workers)
        self.start = {"workers": f"{workers:,}", "rendezvous s": f"{last - began:.2f}",
                      "its CPU s": f"{self._coordinator.cpu_seconds() - before:.2f}",
                      "bytes of a join": f"{self._swarm.totals()['bytes'] // workers:,}"}

    def steady(self) -> dict[str, str]:
        """Measure the cost of beats, and the memory of this process."""
        time.sleep(SETTLE_SECONDS)
        began = self._coordinator.cpu_seconds()
        time.sleep(STEADY_SECONDS)
        share = (self._coordinator.cpu_seconds() - began) / STEADY_SECONDS
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {**self.start, "beats, % of a core": f"{100 * share:.1f}", "memory MB": f"{most:.0f}"}

    def kill(self, deaths: int) -> dict[str, str]:
        """Let workers die at the same time, spread over the nodes; measure until the survivors have joined."""
        chosen = self._alive[::max(1, len(self._alive) // deaths)][:deaths]
        return self._lose(chosen, "die", f"{deaths} die")

    def lose_node(self) -> dict[str, str]:
        """Let the processes of a node end at the same time, its relay's too; measure until the others have joined."""
        node = self._swarm.names[self._alive[len(self._alive) // 2]]
        chosen = [name for name in self._alive if self._swarm.names[name] == node]
        return self._lose(chosen, "lose", f"a node of {len(chosen)}", [node])

    def freeze(self, workers: int) -> dict[str, str]:
        """Let workers freeze; measure until the others have joined."""
        return self._lose(self._alive[1::max(1, len(self._alive) // workers)][:workers], "freeze", f"{workers} freeze")

    def close(self) -> None:
        """End coordinator and workers."""
        self._swarm.close()
        self._coordinator.end()

    def _lose(self, chosen: list[str], how: str, event: str, what: list[str] | None = None) -> dict[str, str]:
        before = self._swarm.totals()
        cpu = self._coordinator.cpu_seconds()
        began = time.monotonic()
        self._swarm.order({how: what or chosen})
        self._alive = [name for name in self._alive if name not in set(chosen)]
        generation, last = self._swarm.formed(len(self._alive))
        ended, self._generation = generation - self._generation, generation
        cpu = self._coordinator.cpu_seconds() - cpu
        after = self._swarm.totals()
        learnt = sorted(self._coordinator.learnt[name] - began for name in chosen)
        cut = self._coordinator.learnt.keys() & set(self._alive)
        if cut or after["cut"]:
            self.problems.append(f"{self._workers} workers, {event}: {max(len(cut), after['cut'])} survivors cut off")
        return {"workers": f"{self._workers:,}", "event": event, "seconds": f"{last - began:.3f}",
                "learnt p50": f"{learnt[len(learnt) // 2]:.3f}", "learnt p99": f"{learnt[len(learnt) * 99 // 100]:.3f}",
                "ended": str(ended), "its CPU s": f"{cpu:.3f}",
                "workers' CPU s": f"{after['cpu'] - before['cpu']:.2f}",
                "aborts": f"{after['aborts'] - before['aborts']:,}",
                "frames out": f"{after['frames'] - before['frames']:,}",
                "kB out": f"{(after['bytes'] - before['bytes']) / 1e3:,.0f}", "cut off": len(cut)}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1000])
    options.add_argument("--deaths", type=int, nargs="+", default=[1, 10, 100])
    options.add_argument("--beat", type=float, default=0.0, help="seconds between two beats (default: as a worker)")
    options.add_argument("--heartbeat", type=float, default=3.0, help="seconds until a silent worker is lost")
    options.add_argument("--relays", action="store_true", help="workers of a node share one connection")
    options.add_argument("--spread", type=float, default=0.0, help="seconds over which members leave a generation")
    options.add_argument("--limit", type=float, default=5.0, help="seconds that a generation may take after deaths")
    options.add_argument("--output", default="", help="also write the times as JSON, for tidewheel plan goodput")
    given = options.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    starts: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    problems: list[str] = []
    for workers in given.workers:
        measurement = Measurement(workers, given.beat, relays=given.relays, heartbeat=given.heartbeat,
                                  spread=given.spread)
        try:
            starts.append(measurement.steady())
            for deaths in [deaths for deaths in given.deaths if 4 * deaths <= workers]:
                events.append(measurement.kill(deaths))
                if float(events[-1]["seconds"]) > given.limit:
                    problems.append(f"{workers} workers, {events[-1]['event']}: {events[-1]['seconds']} s")
                time.sleep(SETTLE_SECONDS)
            if given.relays:
                events.append(measurement.lose_node())
                time.sleep(SETTLE_SECONDS)
            events.append(measurement.freeze(1))
        finally:
            measurement.close()
        problems += measurement.problems
        print(f"{workers} workers: done", file=sys.stderr, flush=True)
    print_table(starts, title="start and steady state")
    print_table(events, title="from an event until the last survivor has joined the next generation")
    if given.output:
        deaths = [row for row in events if row["event"].endswith(" die")]
        Path(given.output).write_text(json.dumps({"kind": "control_plane", "agreements": [
            {"workers": int(row["workers"].replace(",", "")), "deaths": int(row["event"].split()[0]),
             "seconds": float(row["seconds"])} for row in deaths]}))
    print("\n".join(problems) or "no survivor was cut off, and all ranks are right")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
