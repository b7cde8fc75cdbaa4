"""Measure what a run loses when its driver is killed or freezes, and another driver is started.

    python -m tests.benchmarks.driver_loss [--only CASE ...] [--step-seconds 0.1]

Two workers train on a `LocalCluster`; the driver's process is apart from them, and the coordinator is an actor beside
it.

- killed: SIGKILL to the driver. A second one is started half a second later.
- coordinator killed: SIGKILL to the coordinator alone. The driver must end by itself, and is started again.
- coordinator frozen: SIGSTOP to the coordinator alone. Training must go on; the driver must end the coordinator and
  start another.
- frozen: SIGSTOP to the driver alone. Training must go on; then the driver wakes up.
- frozen, taken over: SIGSTOP to the driver alone; a second one is started with --take-over.
- host frozen: SIGSTOP to the driver, the coordinator and Ray Train's controller, as if their machine stood still. A
  second driver is started with --take-over. Then they wake up.

`old workers end` is the time from the signal until the last of the old driver's workers has ended, `next step` that
until the first step that the run had not done before, by the workers' own records, `checkpoint` that until the next
committed one. The second table has what `next step` consists of: `driver ends` until the killed driver's process
has ended (0 for one that lives on), `driver starts` until the new driver's process has imported what it needs and
connected to Ray, and the parts of its event `started`. The exit code is 1 if a run does not continue, if the old driver
commits anything after it has woken up, or if the audit fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.world import REPOSITORY, World, disturbed_run, prepare, settings
from tidewheel import jsonlog
from tidewheel.commit_log import CommitLog, epoch_of
from tidewheel.commit_record import Record
from tidewheel.console import print_table
from tidewheel.train.audit import audit

AT_STEP = 33
STEPS = 240
MOST_SECONDS = 600.0
FROZEN_SECONDS = 10.0
"""How long the driver stands still where it wakes up again."""


@dataclass
class Outcome:
    """What one case cost."""

    case: str
    next_step: float = 0.0
    checkpoint: float = 0.0
    workers_end: float | None = None
    """Seconds until no worker's process of the old driver exists any more; None: some do until the run is over."""
    again: int = 0
    """Steps that were done a second time."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of a new driver's start, see the module."""
    problems: list[str] = field(default_factory=list)


def losses(world: World) -> list[dict[str, Any]]:
    """Return the run's records of steps, the oldest first."""
    lines = [line for line in jsonlog.read(world.run_store, "metrics.jsonl") if "loss" in line]
    return sorted(lines, key=lambda line: line["time"])


def newest(world: World) -> Record:
    """Return the newest record of the run's commit log."""
    head = CommitLog(world.run_store.child("checkpoints")).head()
    assert head is not None
    return head


def has_checkpoints(world: World) -> bool:
    """Return whether the run has committed a checkpoint."""
    head = CommitLog(world.run_store.child("checkpoints")).head()
    return head is not None and bool(head.checkpoints)


class Case:
    """One run and what happens to its driver.

    Args:
        world: the run.
        name: name of the case.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._outcome = Outcome(name)
        self._second: subprocess.Popen[bytes] | None = None
        self._at = 0.0
        self._workers: set[int] = set()

    def run(self) -> Outcome:
        """Disturb the run, let it finish, and return the cost."""
        world = self._world
        self._until(lambda: world.step >= AT_STEP and has_checkpoints(world), "the run did not start")
        self._workers = set(world.trainers())
        actions = {"killed": self._kill, "coordinator killed": self._kill_coordinator,
                   "coordinator frozen": self._freeze_coordinator, "frozen": self._freeze,
                   "frozen, taken over": self._freeze_and_take_over, "host frozen": self._freeze_host}
        actions[self._outcome.case]()
        (world.folder / "hurry").touch()
        self._until(lambda: world.finished, "the run did not finish")
        if self._second is not None:
            self._second.wait(timeout=60)
        self._count()
        audited = audit(world.config.run_uri)
        if not audited.ok:
            self._outcome.problems.append(audited.summary())
        return self._outcome

    def _kill(self) -> None:
        at, before = time.time(), newest(self._world)
        self._world.kill_driver()  # `World.supervise` starts the next one half a second later
        self._measure(at, before)

    def _kill_coordinator(self) -> None:
        [pid] = self._beside("ray::Coordinator")
        at, before = time.time(), newest(self._world)
        os.kill(pid, signal.SIGKILL)
        self._measure(at, before)

    def _freeze_coordinator(self) -> None:
        [pid] = self._beside("ray::Coordinator")
        at, before = time.time(), newest(self._world)
        os.kill(pid, signal.SIGSTOP)
        self._measure(at, before)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _freeze(self) -> None:
        pid = self._driver()
        at, before = time.time(), newest(self._world)
        os.kill(pid, signal.SIGSTOP)
        self._measure(at, before)
        time.sleep(max(0.0, at + FROZEN_SECONDS - time.time()))
        os.kill(pid, signal.SIGCONT)

    def _freeze_and_take_over(self) -> None:
        pid = self._driver()
        at, before = time.time(), newest(self._world)
        os.kill(pid, signal.SIGSTOP)
        self._start_second(CHAOS_TAKE_OVER="1")
        self._measure(at, before)
        self._wake_up([pid])

    def _freeze_host(self) -> None:
        stopped = [self._driver(), *self._beside("ray::Coordinator", "ray::ElasticController")]
        at, before = time.time(), newest(self._world)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        self._start_second(CHAOS_TAKE_OVER="1")
        self._measure(at, before)
        self._wake_up(stopped)

    def _driver(self) -> int:
        process = self._world._process
        assert process is not None
        self._world.closing = True  # the second driver is started here, not by `World.supervise`
        return process.pid

    def _beside(self, *titles: str) -> list[int]:
        """Return the process ids of the run's actors on the driver's node, one for each title."""
        found = []
        for title in titles:
            pids = [process.pid for process in psutil.process_iter(["cmdline"])
                    if " ".join(process.info["cmdline"] or []).startswith(title) and self._is_ours(process)]
            if len(pids) != 1:
                raise RuntimeError(f"{self._outcome.case}: {len(pids)} processes are called {title}")
            found += pids
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        """Return whether a process belongs to this cluster: others may run on this machine."""
        with contextlib.suppress(psutil.Error):
            return process.environ().get("CHAOS_HURRY") == str(self._world.folder / "hurry")
        return False

    def _start_second(self, **environment: str) -> None:
        world = self._world
        with open(world.folder / "second.err", "w") as errors:
            self._second = subprocess.Popen(
                [sys.executable, "-m", world.program, str(world.folder / f"{world.config.run.id}.yaml"),
                 world.cluster.address], env={**world.environment, **environment}, cwd=REPOSITORY,
                stdout=subprocess.DEVNULL, stderr=errors)

    def _wake_up(self, pids: list[int]) -> None:
        """Let the old driver and what was stopped with it continue. They must end, and commit nothing."""
        epoch = newest(self._world).epoch
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._until(lambda: self._world.drivers[0].code is not None, "the old driver did not end")
        if newest(self._world).epoch != epoch:
            self._outcome.problems.append("the old driver has taken the run back")

    def _measure(self, at: float, before: Record) -> None:
        """Wait until the run has done a new step and committed a checkpoint, and note the times since `at`."""
        world, outcome = self._world, self._outcome
        taken_over = self._outcome.case != "frozen"

        def is_committed() -> bool:
            if outcome.workers_end is None and not self._workers & world.trainers().keys():
                outcome.workers_end = time.time() - at
            head = newest(world)
            if not taken_over:
                return bool(set(head.checkpoints) - set(before.checkpoints))
            return head.epoch > before.epoch and epoch_of(head.generation) == head.epoch  # by the new owner

        self._until(is_committed, "no checkpoint was committed")
        outcome.checkpoint = time.time() - at
        self._at = at

    def _count(self) -> None:
        """Read the other figures from the run's files, which are complete now."""
        world, outcome, at = self._world, self._outcome, self._at
        lines = losses(world)
        furthest = max(line["step"] for line in lines if line["time"] <= at)
        if outcome.case != "frozen":
            resumed = next(event for event in world.events("resume") if event["time"] > at)
            furthest = max(line["step"] for line in lines if line["time"] <= resumed["time"])
            outcome.again = furthest - resumed["detail"]["step"]
            outcome.parts = self._parts(at)
        outcome.next_step = next(line["time"] for line in lines
                                 if line["step"] > furthest and line["time"] > at) - at

    def _parts(self, at: float) -> dict[str, float]:
        """Return the seconds of each part of the new driver's start."""
        started = next(event for event in self._world.events("started") if event["time"] > at)
        called = started["time"] - started["detail"]["seconds"]
        old = self._world.drivers[0]
        # a frozen driver has not ended, nor has one that starts another coordinator before the run is over
        ended = old.ended - at if self._second is None and at < old.ended < called + 1 else 0.0
        return {"driver ends": ended, "driver starts": called - at - ended, **started["detail"]["parts"]}

    def _until(self, condition: Callable[[], bool], problem: str) -> None:
        until = time.monotonic() + MOST_SECONDS
        while not condition():
            if self._second is not None and self._second.poll() not in (None, 0):
                text = (self._world.folder / "second.err").read_text()[-1000:]
                raise RuntimeError(f"{self._outcome.case}: the second driver ended: {text}")
            if time.monotonic() > until:
                raise RuntimeError(f"{self._outcome.case}: {problem}: {self._state()}")
            time.sleep(0.05)

    def _state(self) -> str:
        """Return what is known of a run that does not go on."""
        world = self._world
        kinds = [event["kind"] for event in jsonlog.read(world.run_store, "events.jsonl")]
        errors = [file.read_text()[-500:] for file in sorted(world.folder.glob("driver-*.err"))]
        return f"step {world.step}, events {kinds[-20:]}, drivers {errors}"


CASES = ("killed", "coordinator killed", "coordinator frozen", "frozen", "frozen, taken over", "host frozen")


def measure(folder: Path, case: str, step_seconds: float) -> Outcome:
    """Return the cost of one case."""
    prepare(folder)
    config = settings(folder, "run", STEPS, workers=2, overrides=("reproducible=true",))
    with disturbed_run(folder, config, nodes=2, step_seconds=step_seconds,
                       CHAOS_HURRY=str(folder / "hurry")) as world:
        one = Case(world, case)
        try:
            return one.run()
        except RuntimeError as error:
            return Outcome(case, problems=[str(error)])
        finally:
            if one._second is not None and one._second.poll() is None:
                one._second.kill()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    options.add_argument("--step-seconds", type=float, default=0.1, help="seconds added to each step")
    options.add_argument("--json", default="", help="file for the outcomes")
    given = options.parse_args()
    outcomes = []
    for case in given.only:
        with tempfile.TemporaryDirectory(prefix="tw-driver-") as name:
            outcomes.append(measure(Path(name), case, given.step_seconds))
        print(f"{outcomes[-1]}", file=sys.stderr, flush=True)
    print_table([{"case": one.case, "old workers end, s": "-" if one.workers_end is None else f"{one.workers_end:.1f}",
                  "next step, s": f"{one.next_step:.1f}", "steps again": one.again,
                  "checkpoint, s": f"{one.checkpoint:.1f}"} for one in outcomes], title="the driver's end")
    started = [one for one in outcomes if one.parts]
    if started:
        print_table([{"case": one.case, **{f"{name.replace('_', ' ')}, s": f"{seconds:.1f}"
                                           for name, seconds in one.parts.items()}} for one in started],
                    title="until the first step of the new driver")
    if given.json:
        Path(given.json).write_text(json.dumps([vars(one) for one in outcomes]))
    problems = [f"{one.case}: {problem}" for one in outcomes for problem in one.problems]
    print("\n".join(problems) or "every run went on")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
