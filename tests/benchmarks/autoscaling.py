"""Ray's autoscaler with our pipelines and trainings: time from the wish to the first work, and from idle to released.

    python -m tests.benchmarks.autoscaling

A head without CPUs and two groups that begin at zero nodes: `data` (1 CPU each) and `train` (2 CPUs each, which the
pipeline's tasks do not need and the training's workers do). A pipeline scales `data` up; a training begins with the
first node that can take a worker, grows, and shrinks when a node is drained. Exit code 1 if a node above the minimum is
left after the idle time, or anything went wrong.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from typing import Any

import ray

from tidewheel import jsonlog
from tidewheel.cluster.autoscaling import AutoscaledGroup
from tidewheel.cluster.faults import drain_node
from tidewheel.cluster.groups import GROUP_LABEL
from tidewheel.cluster.local import LocalCluster
from tidewheel.config import load
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.demo.corpus import build_corpus
from tidewheel.elastic.trainer import fit
from tidewheel.storage import store
from tidewheel.train.config import TrainConfig

IDLE_SECONDS = 10.0


class Watch:
    """How many nodes each group has, over time."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seen: list[tuple[float, dict[str, int]]] = [(0.0, {})]
        self._ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def now(self) -> dict[str, int]:
        return self.seen[-1][1]

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            counts: dict[str, int] = {}
            for row in ray.nodes():
                if row["Alive"] and (group := row["Labels"].get(GROUP_LABEL)):
                    counts[group] = counts.get(group, 0) + 1
            if counts != self.now():
                self.seen.append((time.monotonic() - self.began, counts))
                print(f"{self.seen[-1][0]:6.1f} s  {counts or 'no nodes'}", flush=True)

    def wait(self, group: str, count: int, seconds: float) -> float:
        """Seconds until the group has so many nodes; raises when it takes longer than `seconds`."""
        began = time.monotonic()
        while self.now().get(group, 0) != count:
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"{group} has {self.now().get(group, 0)} nodes after {seconds} s, not {count}")
            time.sleep(0.1)
        return time.monotonic() - began


def main() -> int:
    """See the module."""
    folder = tempfile.mkdtemp(prefix="tidewheel-autoscaling-")
    build_corpus(store(f"{folder}/raw"), max_bytes=600_000)
    groups = [AutoscaledGroup("data", 0, 2, 1), AutoscaledGroup("train", 0, 2, 2)]
    with LocalCluster(nodes=0, autoscaled=groups, idle_seconds=IDLE_SECONDS) as cluster:
        os.environ.update(cluster.client_environment)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        watch = Watch()
        began, first = time.monotonic(), []

        def on_unit(stage: str, done: int, total: int, note: str = "") -> None:
            if done:
                first.append(time.monotonic() - began)

        config = load(PipelineConfig, "pipelines/demo.yaml")
        pipeline.run(config, input=f"{folder}/raw", output=f"{folder}/data", on_progress=on_unit)
        took = time.monotonic() - began
        print(f"pipeline: first unit after {first[0]:.1f} s from no nodes, done after {took:.1f} s", flush=True)
        released = max(watch.wait(group, 0, 90) for group in ("data", "train"))
        print(f"pipeline: all nodes let go {released:.1f} s after its end (idle time {IDLE_SECONDS:g} s)", flush=True)
        return _train(folder, cluster, watch)


def _train(folder: str, cluster: LocalCluster, watch: Watch) -> int:
    settings = TrainConfig.model_validate({
        "run": {"id": "elastic", "uri": f"{folder}/runs"}, "data": {"uri": f"{folder}/data/shards"}, "steps": 3000,
        "model": {"dim": 64, "num_layers": 2, "num_heads": 2, "tie_embeddings": True},
        "batch": {"global_sequences": 4, "micro_sequences": 2, "virtual_ranks": 2},
        "evaluation": {"sample_tokens": 0}, "checkpoint": {"every_steps": 50},
        "elastic": {"min_workers": 1, "max_workers": 2, "cpus_per_worker": 2, "join_wait_seconds": 1,
                    "resize_interval_seconds": 1}})
    began, seen, drained = time.monotonic(), {}, threading.Event()

    def on_progress(progress: dict[str, Any]) -> None:
        if progress.get("step"):
            seen.setdefault("first step", time.monotonic() - began)
        if progress.get("world_size") == 2:
            seen.setdefault("two workers", time.monotonic() - began)
            if not drained.is_set() and progress["step"] > 20:
                drained.set()
                node = next(row for row in ray.nodes() if row["Alive"] and row["Labels"].get(GROUP_LABEL) == "train")
                drain_node(cluster.address, node["NodeID"], 20, "spot reclaim")
        if drained.is_set() and progress.get("world_size") == 1:
            seen.setdefault("shrunk", time.monotonic() - began)

    result = fit(settings, on_progress=on_progress)
    ended = time.monotonic()
    print("training: " + ", ".join(f"{name} after {seconds:.1f} s" for name, seconds in seen.items())
          + f"; {result.steps} steps after {ended - began:.1f} s", flush=True)
    sizes = [event["detail"]["world_size"] for event in jsonlog.read(store(settings.run_uri), "events.jsonl")
             if event["kind"] in ("start", "resume")]
    print(f"training: world sizes {' -> '.join(map(str, sizes))}")
    released = watch.wait("train", 0, 90)
    print(f"training: all nodes let go {released:.1f} s after its end; left: {watch.now() or 'none'}", flush=True)
    return 0 if result.steps == settings.steps and "first step" in seen and not watch.now() else 1


if __name__ == "__main__":
    sys.exit(main())
