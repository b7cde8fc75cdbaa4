"""The progress bar of a training run."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from tidewheel.console import bars, console

LINES = {
    "failure": "a worker failed: {error}",
    "worker_left_out": "left out: a {level} of node {node}, blamed {times} time(s), for {seconds} s: {reason}",
    "worker_readmitted": "readmitted after a probe: a worker of node {node}",
    "taken_over": "{error}",
    "coordinator_lost": "continues with another coordinator: {error}",
    "setting_changed": "{setting} was {before} in the previous start and is now {now}",
    "continued_before_decay": "the checkpoint of step {newest} has decayed: the run continues from step {step}, before "
                              "the decay, to step {steps}",
    "branched": "branched from {parent}",
    "node_lost": "node {host} is gone",
    "node_joined": "node {host} joined",
    "node_draining": "node {host} is draining",
    "resize": "world size {from} -> {to} ({reason})",
    "tensor_groups_split": "{groups} of {of} tensor-parallel groups span two nodes, so every layer waits for the "
                           "network; give each node a multiple of {tensor} workers",
    "resize_called_off": "the change of world size is called off",
    "resume": "resumed at step {step}, world size {world_size}, {redo} steps to repeat",
    "checkpoint_refused": "checkpoint {checkpoint} is refused: {reason}; trying the previous one",
    "straggler": "rank {slow_rank} is slow: it takes {own_seconds} s of a step, the median is {median_seconds} s{gpu}",
    "shares": "workers compute {virtual_ranks} virtual ranks of each step, by their speed",
    "straggler_over": "rank {slow_rank} is no longer slow",
    "sink_failed": "metrics do not reach {sink}: {reason}; training continues",
    "callback_failed": "the callback {callback} failed in {hook}: {reason}; training continues",
    "guard": "{reason} at step {step}: {action} (loss {loss}, gradient norm {gradient_norm})",
    "rollback": "rolled back from step {step} to {back_to}; skipping {count} sequences from position {position}",
    "hang": "{found}",
    "corruption": "silent corruption at step {step}, since step {since} at the earliest: {what}, of {nodes}",
    "shard_read_again": "{shard} was read again: {problem}",
    "memory_refused": "step {step} in memory is refused: {reason}; trying an older one",
    "memory_tier_lost": "rank {rank} no longer keeps snapshots in memory: {reason}",
    "local_disk_refused": "a state on local disks is refused: {reason}",
    "local_disk_failed": "rank {rank} has not written its state to the local disk: {reason}; training continues",
    "data_wait": "waiting for wave {wave} of {waves} of the shard set",
    "data_came": "the shard set has grown to {known} of {waves} waves, after {seconds} s",
    "storage_away": "storage is unavailable ({reason}); waiting for it",
    "control_error": "the coordinator had an error at {where}, {times} times: {error}; it continues",
    "slow_link": "the link between {hosts} is slow: {figures}",
    "save_failed": "checkpoint {checkpoint} could not be saved: {reason}; training continues",
}
"""Text of an event by its kind, formatted with its detail; an event without a text is shown by its kind."""
WIDTH = 200


@contextlib.contextmanager
def training_bar(steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show a progress bar, and yield the `on_progress` for `fit`.

    Its argument has "step" and, once known, "loss", "tokens_per_second" and "world_size".
    """
    with bars() as group, group.bar("training", steps, unit="steps") as bar:
        is_under_way = False

        def on_progress(progress: dict[str, Any]) -> None:
            nonlocal is_under_way
            parts = []
            if (loss := progress.get("loss")) is not None:
                parts.append(f"loss {loss:.3f}")
            if speed := progress.get("tokens_per_second"):
                parts.append(f"{speed:,.0f} tokens/s")
            if workers := progress.get("world_size"):
                parts.append(f"{workers} worker{'s' if workers > 1 else ''}")
            for event in progress.get("events", ()):
                console.print(f"  · {describe(event)}", markup=False)
            if loss is not None and not is_under_way:  # starting workers takes longer than many steps
                is_under_way = True
                bar.begin_pace(progress["step"])
            bar.update(progress.get("step") or 0, note=", ".join(parts) or progress.get("state", ""))

        yield on_progress


def describe(event: dict[str, Any]) -> str:
    """Return a line about an event of a run."""
    detail = defaultdict(lambda: "?", event["detail"])
    detail["gpu"] = f"; its GPU: {detail['gpu']}" if event["detail"].get("gpu") else ""
    text = LINES.get(event["kind"], event["kind"].replace("_", " ")).format_map(detail)
    line = text.splitlines()[0]
    return line if len(line) <= WIDTH else line[:WIDTH] + " ..."
