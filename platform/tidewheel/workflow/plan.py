"""What a workflow would run, why, and an estimate of its cost.

Time scales that of earlier steps of the same kind below the same output by the work: bytes of input for data, FLOPs
for training. Without an earlier step it is unknown. Storage is a pipeline's stages and shards, and a training's
checkpoints.

GPU memory is the model's state on one worker (weights, gradients and AdamW's two moments in fp32: 16 bytes per
parameter), divided by the ranks that shard it. Activations come on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel.config import build
from tidewheel.workflow.graph import Node, difference
from tidewheel.workflow.records import Record, Records

STORED_PER_INPUT_BYTE = 1.3
"""Bytes that a pipeline writes per byte of uncompressed input: the demo's 8.9 MB give 11.4 MB."""
STATE_BYTES = 16
"""Bytes of state per parameter on the GPU; see the module."""
SAVED_BYTES = 12
"""Bytes of a parameter in a checkpoint: fp32 weight and two moments."""


@dataclass(frozen=True)
class Planned:
    """One step of a plan."""

    node: Node
    state: str
    """published, to run, to resume, running."""
    why: str
    seconds: float | None
    storage_bytes: int | None
    gpu_bytes: int | None


def plan(nodes: Sequence[Node], records: Records) -> list[Planned]:
    """Return what would run. Reads records only."""
    past = records.all()
    planned: dict[str, Planned] = {}
    for node in nodes:
        planned[node.name] = _planned(node, planned, records, past)
    return list(planned.values())


def rows(planned: Sequence[Planned]) -> list[dict[str, str]]:
    """Return the rows of a table, one per step."""
    return [{"step": step.node.name, "kind": step.node.kind, "state": step.state, "why": step.why,
             "time": "-" if step.state == "published" else _time(step.seconds),
             "storage": _bytes(step.storage_bytes), "GPU memory": _bytes(step.gpu_bytes),
             "output": step.node.place} for step in planned]


def _planned(node: Node, before: Mapping[str, Planned], records: Records, past: Sequence[Record]) -> Planned:
    estimate = (_seconds(node, before, past), _storage(node), _gpu(node))
    if records.published(node) is not None:
        return Planned(node, "published", "nothing has changed", *estimate)
    attempt = records.attempt(node)
    if records.published(node, check=False) is not None:
        why = "its output is gone or was changed"
    elif attempt is not None and attempt["state"] == "failed":
        why = f"it failed before: {attempt['error'].splitlines()[0]}"
    elif attempt is not None:
        why = "it was started and not finished"
    else:
        why = _reason(node, before, past)
    return Planned(node, "to resume" if attempt is not None else "to run", why, *estimate)


def _reason(node: Node, before: Mapping[str, Planned], past: Sequence[Record]) -> str:
    """Return the differences from the newest published step of this name."""
    old = next((record for record in reversed(past) if record.name == node.name and record.kind == node.kind), None)
    if old is None:
        return "it is new"
    reasons = []
    if changed := [key for key in difference(old.recipe, node.recipe) if key != "recipe_hash"]:
        reasons.append("changed: " + ", ".join(changed[:4]) + (" ..." if len(changed) > 4 else ""))
    elif difference(old.recipe, node.recipe):
        reasons.append("its configuration changed")
    if old.content != node.content:
        reasons.append("it reads other files, or their content changed")
    for role, need in node.needs.items():
        if old.inputs.get(role) != before[need].node.key:
            reasons.append(f"reads the new {need}")
    return "; ".join(reasons) or "its inputs changed"


def _work(node: Node, before: Mapping[str, Planned]) -> float | None:
    """Return the bytes of input of a pipeline, or the FLOPs of a training; None for other steps."""
    if node.kind == "pipeline":
        return float(sum(file[1] for file in node.content["files"])) or None
    if node.kind != "train":
        return None
    config, vocabulary = _training(node)
    length = next((before[need].node.entry["config"]["steps"][-1]["pack"]["sequence_length"]
                   for role, need in node.needs.items() if role.startswith("data")), 2048)
    tokens = config.steps * config.batch.global_sequences * length
    return float(tokens * config.model.flops_per_token(vocabulary, length))


def _seconds(node: Node, before: Mapping[str, Planned], past: Sequence[Record]) -> float | None:
    """Estimate the time from the newest step of the same name, or else of the same kind."""
    similar = [record for record in past if record.kind == node.kind]
    if not similar:
        return None
    newest = max(similar, key=lambda record: (record.name == node.name, record.finished))
    if node.kind == "pipeline":
        old = sum(file[1] for file in newest.content["files"])
        return newest.seconds * (_work(node, before) or old) / max(old, 1)
    if node.kind == "train":
        config, _ = _training(node)
        sequences = newest.recipe["steps"] * newest.recipe["batch"]["global_sequences"]
        return newest.seconds * config.steps * config.batch.global_sequences / sequences
    return newest.seconds


def _storage(node: Node) -> int | None:
    if node.kind == "pipeline":
        return int(STORED_PER_INPUT_BYTE * sum(file[1] for file in node.content["files"]))
    if node.kind == "train":
        config, vocabulary = _training(node)
        return SAVED_BYTES * config.model.parameters(vocabulary) * (config.checkpoint.keep_last + 1)
    return None


def _gpu(node: Node) -> int | None:
    if node.kind != "train":
        return None
    config, vocabulary = _training(node)
    if not config.elastic.gpus_per_worker:
        return None
    split = config.parallel.unit * (config.elastic.min_workers // config.parallel.unit
                                    if config.parallel.data == "zero3" else 1)
    return STATE_BYTES * config.model.parameters(vocabulary) // max(split, 1)


def _training(node: Node) -> tuple[Any, int]:
    """Return a training's configuration, and its vocabulary size (32,000 where only the data will say)."""
    from tidewheel.train.config import TrainConfig

    config = build(TrainConfig, node.entry["config"], where=node.name)
    return config, config.model.vocabulary_size or 32_000


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown: none has run yet"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _bytes(size: int | None) -> str:
    if size is None:
        return "-"
    for unit in ("kB", "MB", "GB"):
        size = -(-size // 1000)
        if size < 1000:
            return f"{size} {unit}"
    return f"{size / 1000:.1f} TB"
