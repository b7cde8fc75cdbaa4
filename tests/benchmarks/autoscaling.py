"""Measure Ray's autoscaler with pipelines and trainings: time from request to first work, and from idle to released.

    python -m tests.benchmarks.autoscaling

The cluster has a head without CPUs and two groups with zero to two nodes each: `data`, and `gpu`, whose nodes have the
custom resource `accelerator` instead of a GPU and start half a minute apart. A pipeline scales `data` up and down. A
training requests two workers with an accelerator each, starts with the first node, grows with the second one, shrinks
when one is drained, and grows into the node that replaces it. The command prints a table of times and bounds. The exit
code is 1 if a bound is exceeded, if a node is left after the idle time, or if work requested nodes of the other group.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from tests.unit.train.helpers import config, write_shards
from tidewheel.cluster.autoscaling import AutoscaledGroup
from tidewheel.cluster.faults import drain_node
from tidewheel.cluster.local import LocalCluster
from tidewheel.config import load
from tidewheel.console import print_table
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.demo.corpus import build_corpus
from tidewheel.elastic.trainer import run_workers
from tidewheel.placement import GROUP_LABEL
from tidewheel.storage import store
from tidewheel.train.audit import audit

SECONDS_APART = 30.0
GROUPS = (AutoscaledGroup("data", 0, 2),
          AutoscaledGroup("gpu", 0, 2, resources={"accelerator": 1}, seconds_apart=SECONDS_APART))
IDLE_SECONDS, NOTICE_SECONDS, STEP_SECONDS, STEPS = 10.0, 20.0, 0.2, 900
UP, DONE, DOWN = "pipeline: first unit, from no node", "pipeline: done", "pipeline: last node gone, after its end"
FIRST, GROWN = "training: first step, with one worker, from no node", "training: with two workers"
SHRUNK, AGAIN = "training: with one, after the notice", "training: with two again, after the notice"
OVER = "training: last node gone, after its end"
#: Seconds, twice those of an idle machine with two cores. Raylets and workers start within UP and FIRST; on a cloud the
#: start of the machine comes on top. After the idle time, the autoscaler has to notice the node, ask its raylet and end
#: it.
BOUNDS = {UP: 30.0, DOWN: IDLE_SECONDS + 10.0, FIRST: 45.0, GROWN: SECONDS_APART + 45.0, SHRUNK: 5.0,
          AGAIN: SECONDS_APART + 45.0, OVER: IDLE_SECONDS + 10.0}
PATIENCE_SECONDS = 120.0


class Watch:
    """A thread that records the number of nodes in each group over time."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.began = time.monotonic()
        self.seen: list[tuple[float, dict[str, int]]] = [(0.0, {})]
        self._say, self._ended = say, threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def now(self) -> dict[str, int]:
        """Return the number of nodes by group."""
        return self.seen[-1][1]

    def wait(self, group: str, count: int, seconds: float) -> float:
        """Wait until the group has `count` nodes and return the seconds.

        Raises:
            TimeoutError: the group does not have `count` nodes after `seconds`.
        """
        began = time.monotonic()
        while self.now().get(group, 0) != count:
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"{group} has {self.now().get(group, 0)} nodes after {seconds:g} s, not {count}")
            time.sleep(0.1)
        return time.monotonic() - began

    def end(self) -> None:
        """Stop recording."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            counts: dict[str, int] = {}
            for row in ray.nodes():
                if row["Alive"] and (group := row["Labels"].get(GROUP_LABEL)):
                    counts[group] = counts.get(group, 0) + 1
            if counts != self.now():
                self.seen.append((time.monotonic() - self.began, counts))
                self._say(f"{self.seen[-1][0]:6.1f} s  {counts or 'no nodes'}")


def scale_pipeline(folder: Path, watch: Watch) -> dict[str, float]:
    """Run a pipeline from no nodes, wait until its nodes are gone, and return the seconds of each phase."""
    build_corpus(store(folder / "raw"), max_bytes=400_000)
    began, seconds_of = time.monotonic(), dict[str, float]()

    def on_unit(stage: str, done: int, total: int, note: str = "") -> None:
        if done:
            seconds_of.setdefault(UP, time.monotonic() - began)

    recipe = load(PipelineConfig, "pipelines/demo.yaml", ["placement.groups=[data]"])
    pipeline.run(recipe, input=str(folder / "raw"), output=str(folder / "data"), on_progress=on_unit)
    seconds_of[DONE] = time.monotonic() - began
    seconds_of[DOWN] = watch.wait("data", 0, PATIENCE_SECONDS)
    return seconds_of


def scale_training(folder: Path, address: str, watch: Watch) -> dict[str, float]:
    """Train from no nodes through growth, a drain and the replacement of the node, and return each phase's seconds."""
    write_shards(folder / "shards", rows=200)
    run_config = config(folder, "autoscaled", f"steps={STEPS}", "data.validation=''", "evaluation.every_steps=0",
                    "evaluation.sample_tokens=0", "checkpoint.every_steps=1000", "elastic.placement.groups=[gpu]",
                    "elastic.resources_per_worker={accelerator: 1}", "elastic.join_wait_seconds=0.5",
                    "elastic.resize_interval_seconds=1")
    began, seconds_of, hurry = time.monotonic(), dict[str, float](), folder / "hurry"
    noticed: list[float] = []

    def worker(settings: dict[str, Any]) -> Any:
        """Run a worker whose steps are slow until all phases are over."""
        from tidewheel.elastic.worker import run_worker
        from tidewheel.train import loop

        step = loop.start_step

        def slow_step(*arguments: Any, **named: Any) -> Any:
            time.sleep(0 if hurry.exists() else STEP_SECONDS)
            return step(*arguments, **named)

        loop.start_step = slow_step
        return run_worker(settings)

    def on_progress(progress: dict[str, Any]) -> None:
        size, now = progress.get("world_size"), time.monotonic()
        if progress.get("step") and size == 1:
            seconds_of.setdefault(FIRST, now - began)
        if size == 2 and not noticed:
            seconds_of[GROWN] = now - began
            noticed.append(now)
            node = next(row for row in ray.nodes() if row["Alive"] and row["Labels"].get(GROUP_LABEL) == "gpu")
            drain_node(address, node["NodeID"], NOTICE_SECONDS, "spot reclaim")
        elif size == 1 and noticed:
            seconds_of.setdefault(SHRUNK, now - noticed[0])
        elif size == 2 and SHRUNK in seconds_of:
            seconds_of.setdefault(AGAIN, now - noticed[0])
            hurry.touch()

    run_workers(run_config, worker, on_progress)
    seconds_of[OVER] = watch.wait("gpu", 0, PATIENCE_SECONDS)
    audited = audit(run_config.run_uri)
    assert audited.ok, audited.summary()
    return seconds_of


def violations(seconds_of: dict[str, float], watch: Watch) -> list[str]:
    """Return what exceeded a bound or broke a rule."""
    problems = [f"{name}: never" for name in BOUNDS if name not in seconds_of]
    problems += [f"{name}: {seconds:.1f} s, the bound is {BOUNDS[name]:g} s" for name, seconds in seconds_of.items()
             if seconds > BOUNDS.get(name, seconds)]
    problems += [f"{count} node(s) of group {group} left" for group, count in watch.now().items()]
    if any(len(counts) > 1 for _, counts in watch.seen):
        problems.append("both groups had nodes at once: work requested a group that it does not run in")
    return problems


def main() -> int:
    """Run the command line and return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="tidewheel-autoscaling-"))
    with LocalCluster(nodes=0, autoscaled=GROUPS, idle_seconds=IDLE_SECONDS) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        watch = Watch(lambda text: print(text, flush=True))
        try:
            seconds_of = {**scale_pipeline(folder, watch), **scale_training(folder, cluster.address, watch)}
        finally:
            watch.end()  # a thread that queries a stopped cluster would end the process before it shows the error
            ray.shutdown()
    print_table([{"what": name, "seconds": f"{seconds:.1f}", "bound": f"{BOUNDS[name]:g}" if name in BOUNDS else "-"}
                 for name, seconds in seconds_of.items()])
    wrong = violations(seconds_of, watch)
    print("\n".join(wrong) or "every node above the minimum was released")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
