"""Kill a node of a run of 300 workers every 60 s and every 15 s: the share of steps committed, beside torchft's.

    python -m tests.benchmarks.storm [--minutes 24] [--speed 2] [--kills 60 15] [--spares 0 1 3 6]

The published storm is https://pytorch.org/blog/fault-tolerant-llama-training-with-2000-synthetic-failures-every-15-seconds-and-no-checkpoints-on-crusoe-l40s/
(June 2025): 30 hosts with 10 L40S each, steps of 9 s, one host's job cancelled every 60 s, or after a random time of 0
to 30 s. The same is done here to the real coordinator, membership, server, resize policy and events.

Simulated are the workers (`storm_clients`: connections without torch that speak the real protocol and take steps of 9
s), the restart of a killed node (24 s: with 29.6 of 30 hosts taking part on average, theirs was away for that long
after each kill), the new process groups and the load of the state from memory (1 s, theirs too), and the memory tier:
each node's part has one copy where the real placement puts it, made anew after each load and each step. When both are
killed before that, the run goes back to its newest checkpoint in storage, and the steps since then count as not
committed. The global batch is the same for any number of workers, so a step with fewer takes longer. Nodes that stand
by take over at once.

All simulated times, and the policies' waits, are divided by `--speed`. What the control plane itself takes is real, so
that a higher speed makes the result worse, not better. The exit code is 1 when a share is below the published one, or
when a survivor is cut off.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.control_plane import MeasuredCoordinator
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.replicas import replica_candidates
from tidewheel.console import print_table
from tidewheel.elastic.layout import legal_sizes
from tidewheel.train.elastic_config import ElasticConfig
from tidewheel.train.node_checks_config import NodeChecksConfig

NODES = 30
RANKS_A_NODE = 10
STEP_SECONDS = 9.0
RESTART_SECONDS = 24.0
REBUILD_SECONDS = 1.0
START_SECONDS = 60.0
VIRTUAL_RANKS = 3
"""Virtual ranks of each worker in the largest generation. Smaller generations have a divisor of all virtual ranks."""


@dataclass(frozen=True)
class Published:
    """What torchft's authors measured at one rate of failures."""

    kills: int
    steps: int
    committed: int
    step_seconds: float
    """Average over all steps, also those that failed."""
    hosts: float
    """Taking part in a step on average, of 30."""

    @property
    def effective(self) -> float:
        """Work of all committed steps, relative to 30 hosts that do a step each 9 s. A step's batch has only the hosts
        that take part."""
        return self.committed / self.steps * STEP_SECONDS / self.step_seconds * self.hosts / NODES


PUBLISHED = {60.0: Published(1100, 6249, 5145, 10.9, 29.6), 15.0: Published(1015, 888, 268, 15.46, 18.9)}


@dataclass(frozen=True)
class Setting:
    """One storm."""

    kill_seconds: float
    """Average time between two kills."""
    spares: int
    """Nodes beyond the largest legal number of workers."""
    minutes: float
    speed: float
    save_steps: int
    """Steps between two checkpoints in storage."""
    seed: int = 0

    @property
    def ranks(self) -> int:
        """Largest number of workers in a generation."""
        return (NODES - self.spares) * RANKS_A_NODE

    @property
    def elastic(self) -> ElasticConfig:
        """The defaults, with waits divided by the speed. Random kills say nothing about a node, so none is left out."""
        plain = ElasticConfig(max_workers=self.ranks)
        return ElasticConfig(
            max_workers=self.ranks, standby_workers=self.spares * RANKS_A_NODE,
            heartbeat_seconds=30,  # all workers are one process, which a busy machine may keep waiting
            join_wait_seconds=plain.join_wait_seconds / self.speed,
            resize_interval_seconds=plain.resize_interval_seconds / self.speed,
            backoff_seconds=plain.backoff_seconds / self.speed,
            max_backoff_seconds=plain.max_backoff_seconds / self.speed, node_checks=NodeChecksConfig(failures=0))


class StormCoordinator(MeasuredCoordinator):
    """The coordinator of one storm.

    Args:
        setting: the storm.
    """

    def __init__(self, setting: Setting) -> None:
        sizes = legal_sizes(VIRTUAL_RANKS * setting.ranks, RANKS_A_NODE, setting.ranks)
        super().__init__(tempfile.mkdtemp(), setting.ranks, elastic=setting.elastic, sizes=sizes)


@dataclass
class Copies:
    """Which nodes' parts of the newest committed step exist in memory."""

    nodes: list[str]
    """All that live."""
    members: set[str]
    """Those that had ranks, and so have parts."""
    holders: dict[str, str] = field(init=False)
    """Node with the copy of each node's part."""
    gone: set[str] = field(default_factory=set)
    """Nodes killed since the step was committed."""

    def __post_init__(self) -> None:
        agents = [Address(node, 1) for node in self.nodes]
        self.holders = {agent.host: replica_candidates(agents, agent)[0].host for agent in agents}

    def lost(self) -> bool:
        """Return whether some part is gone with its copy."""
        return any(self.holders.get(node) in self.gone for node in self.gone & self.members)


class Storm:
    """One run under kills.

    Args:
        setting: the storm.
    """

    def __init__(self, setting: Setting) -> None:
        self.problems: list[str] = []
        self._setting = setting
        self._random = random.Random(setting.seed)
        self._coordinator = StormCoordinator(setting)
        self._coordinator.start("127.0.0.1")
        self._nodes = {f"n{index:02d}": self._names(index, 0) for index in range(NODES)}
        self._lives = dict.fromkeys(self._nodes, 0)
        self._due: dict[str, float] = {}  # when killed nodes are back
        self._members: set[str] = set()
        self._copies = Copies(list(self._nodes), self._members)
        self._step = 0
        self._saved = 0
        self._undone = 0
        self._rewinds = 0
        self._kills = 0
        self._waiting_since: float | None = None  # the kill that the next generation follows
        self._recoveries: list[float] = []
        self._reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self.measured: dict[str, float] = {}
        """The result, for `tidewheel plan goodput`; see `plan.measured.StormRow`."""
        self._process = self._start()

    def run(self) -> dict[str, str]:
        """Let it storm, and return the result.

        Raises:
            RuntimeError: no generation forms.
        """
        speed, every = self._setting.speed, self._setting.kill_seconds
        self._until(lambda: self._step > 0, START_SECONDS)
        first = self._totals()
        began = time.monotonic()
        end = began + 60 * self._setting.minutes / speed
        kill_at = began
        while kill_at < end:
            wait = every if every >= 60 else self._random.uniform(0.0, 2 * every)
            kill_at += wait / speed
            self._pass(min(kill_at, end))
            if kill_at < end:
                self._kill(self._random.choice(list(self._nodes)))
        last = self._totals()
        return self._row({key: last[key] - first[key] for key in last}, time.monotonic() - began)

    def close(self) -> None:
        """End workers and coordinator."""
        self._process.kill()
        self._process.wait()
        self._coordinator.end()

    def _row(self, totals: dict[str, float], seconds: float) -> dict[str, str]:
        setting = self._setting
        committed = totals["committed"] - self._undone
        share = committed / totals["attempted"]
        effective = committed * STEP_SECONDS / setting.speed / seconds * setting.ranks / (NODES * RANKS_A_NODE)
        published = PUBLISHED.get(setting.kill_seconds)
        if published is not None and share < published.committed / published.steps:
            self.problems.append(f"a kill each {setting.kill_seconds:g} s, {setting.spares} spare nodes: "
                                 f"{_percent(share)} of steps committed, torchft "
                                 f"{_percent(published.committed / published.steps)}")
        if totals["cut"]:
            self.problems.append(f"a kill each {setting.kill_seconds:g} s: {totals['cut']:g} survivors were cut off")
        recoveries = sorted(self._recoveries)
        self.measured = {
            "kill_seconds": setting.kill_seconds, "ranks": setting.ranks, "workers": NODES * RANKS_A_NODE,
            "step_seconds": STEP_SECONDS, "load_seconds": REBUILD_SECONDS, "effective": effective,
            "rejoined_seconds": statistics.median(recoveries) * setting.speed}
        return {"kill each": f"{setting.kill_seconds:g} s", "spare nodes": str(setting.spares),
                "kills": str(self._kills), "steps": f"{totals['attempted']:g}", "committed": _percent(share),
                "ranks": f"{totals['rank_seconds'] / seconds:.0f}",
                "step, s": f"{seconds * setting.speed / totals['attempted']:.1f}", "effective": _percent(effective),
                "rejoined p50, s": f"{statistics.median(recoveries):.3f}",
                "most, s": f"{recoveries[-1]:.3f}", "from storage": str(self._rewinds)}

    # -- what happens ------------------------------------------------------------------------------
    def _kill(self, node: str) -> None:
        """Kill a node's processes and its memory. A node that is on its way back begins again."""
        self._kills += 1
        now = time.monotonic()
        self._due[node] = now + RESTART_SECONDS / self._setting.speed
        names = self._nodes[node]
        self._nodes[node] = []
        if not names:
            return
        if node in self._members:
            self._waiting_since = self._waiting_since or now
        self._copies.gone.add(node)
        self._tell({"die": names})
        if self._copies.lost():
            self._undone += self._step - self._saved
            self._rewinds += 1
            self._step = self._saved
            self._copies.gone.clear()  # the state in storage has no copies to lose
            self._tell({"rewind": self._saved})

    def _pass(self, until: float) -> None:
        """Let time pass: read reports, and bring killed nodes back."""
        while (now := time.monotonic()) < until:
            for node in [node for node, due in self._due.items() if due <= now]:
                del self._due[node]
                self._lives[node] += 1
                names = self._nodes[node] = self._names(int(node[1:]), self._lives[node])
                self._coordinator.expect(dict.fromkeys(names, node))
                self._tell({"start": dict.fromkeys(names, node)})
            next_due = min([until, *self._due.values()])
            try:
                self._take(self._reports.get(timeout=max(0.0, next_due - time.monotonic())))
            except queue.Empty:
                pass  # it is time

    def _take(self, report: dict[str, Any]) -> None:
        if "formed" in report:
            self._members = set(report["nodes"])
            if self._waiting_since is not None:
                self._recoveries.append(report["at"] - self._waiting_since)
                self._waiting_since = None
        if "loaded" in report or "step" in report:
            self._copies = Copies([node for node, names in self._nodes.items() if names], self._members)
        if "step" in report and report["step"] > self._step:
            self._step = report["step"]
            if self._step % self._setting.save_steps == 0:
                self._saved = self._step

    def _totals(self) -> dict[str, float]:
        self._tell({"report": True})
        until = time.monotonic() + START_SECONDS
        while True:
            report = self._reports.get(timeout=max(0.0, until - time.monotonic()))
            if "report" in report:
                return dict(report["report"])
            self._take(report)

    def _until(self, condition: Any, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not condition():
            try:
                self._take(self._reports.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                raise RuntimeError(f"no step within {seconds:g} s: {self._coordinator.snapshot()}") from None

    # -- the workers' process ----------------------------------------------------------------------
    def _start(self) -> subprocess.Popen[str]:
        names = {name: node for node, workers in self._nodes.items() for name in workers}
        self._coordinator.expect(names, anew=True)
        endpoint = self._coordinator.endpoint()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.storm_clients", endpoint.address[0], str(endpoint.address[1])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process = process
        self._tell({"token": endpoint.token, "names": names, "full_step": STEP_SECONDS / self._setting.speed,
                    "full_size": self._setting.ranks, "rebuild": REBUILD_SECONDS / self._setting.speed})
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._reports.put(json.loads(line))

    def _tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    @staticmethod
    def _names(index: int, life: int) -> list[str]:
        return [f"n{index:02d}-{life}-{rank}" for rank in range(RANKS_A_NODE)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def published_rows(kills: list[float]) -> list[dict[str, str]]:
    """Return torchft's published figures in the columns of `Storm.run`."""
    return [{"kill each": f"{seconds:g} s", "spare nodes": "torchft", "kills": str(row.kills), "steps": str(row.steps),
             "committed": _percent(row.committed / row.steps), "ranks": f"{row.hosts * RANKS_A_NODE:.0f}",
             "step, s": f"{row.step_seconds:.1f}", "effective": _percent(row.effective), "rejoined p50, s": "",
             "most, s": "", "from storage": "0"}
            for seconds, row in PUBLISHED.items() if seconds in kills]


def main() -> int:
    """Run the storms, print the table and return the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=24.0, help="simulated length of each storm")
    options.add_argument("--speed", type=float, default=2.0, help="simulated seconds in a second")
    options.add_argument("--kills", type=float, nargs="+", default=[60.0, 15.0], help="seconds between two kills; "
                         "below 60 s they come after a random time of 0 to twice as long")
    options.add_argument("--spares", type=int, nargs="+", default=[0, 1, 3, 6], help="nodes that stand by")
    options.add_argument("--save-steps", type=int, default=20, help="steps between two checkpoints in storage")
    options.add_argument("--output", default="", help="also write the results as JSON, for tidewheel plan goodput")
    given = options.parse_args()
    rows: list[dict[str, str]] = []
    measured: list[dict[str, float]] = []
    problems: list[str] = []
    for kill_seconds in given.kills:
        for spares in given.spares:
            storm = Storm(Setting(kill_seconds, spares, given.minutes, given.speed, given.save_steps))
            try:
                rows.append(storm.run())
            finally:
                storm.close()
            measured.append(storm.measured)
            problems += storm.problems
            print(rows[-1], file=sys.stderr, flush=True)
    print_table([*rows, *published_rows(given.kills)], title=f"{NODES} nodes with {RANKS_A_NODE} workers each, "
                f"steps of {STEP_SECONDS:g} s")
    if given.output:
        Path(given.output).write_text(json.dumps({"kind": "storm", "storms": measured}))
    print("\n".join(problems) or "no share is below the published one, and no survivor was cut off")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
