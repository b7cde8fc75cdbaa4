"""What a workflow would run, why, and what it would take: an estimate from earlier runs and from plain arithmetic.

Time is that of earlier steps of the kind below the same output, in proportion to the work (bytes of input for data,
FLOPs for training); without any it is unknown and said so. Storage: a pipeline keeps its stages and shards, a training
its checkpoints. GPU memory is the model's state on one worker (weights, gradients, fp32 master copy and moments: 16
bytes a parameter with AdamW, arXiv:1910.02054), divided by what the layout shards; activations come on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel.config import build
from tidewheel.workflow.graph import Node, difference
from tidewheel.workflow.records import Record, Records

STORED_PER_INPUT_BYTE = 1.3
"""What a pipeline writes for a byte of uncompressed input: the demo's 8.9 MB give 11.4 MB."""
STATE_BYTES = 16
SAVED_BYTES = 12
"""Of a parameter in a checkpoint: fp32 weight and two moments."""


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
    """What would run. Reads records only."""
    past = records.all()
    found: dict[str, Planned] = {}
    for node in nodes:
        found[node.name] = _planned(node, found, records, past)
    return list(found.values())


def rows(planned: Sequence[Planned]) -> list[dict[str, str]]:
    """For a table."""
    return [{"step": each.node.name, "kind": each.node.kind, "state": each.state, "why": each.why,
             "time": "-" if each.state == "published" else _time(each.seconds),
             "storage": _bytes(each.storage_bytes), "GPU memory": _bytes(each.gpu_bytes),
             "output": each.node.place} for each in planned]


def _planned(node: Node, before: Mapping[str, Planned], records: Records, past: Sequence[Record]) -> Planned:
    estimate = (_seconds(node, before, past), _storage(node), _gpu(node))
    if records.published(node) is not None:
        return Planned(node, "published", "nothing has changed", *estimate)
    attempt = records.attempt(node)
    if records.published(node, check=False) is not None:
        why = "what it made is gone or was changed"
    elif attempt is not None and attempt["state"] == "failed":
        why = f"it failed before: {attempt['error'].splitlines()[0]}"
    elif attempt is not None:
        why = "it was begun and not finished"
    else:
        why = _reason(node, before, past)
    return Planned(node, "to resume" if attempt is not None else "to run", why, *estimate)


def _reason(node: Node, before: Mapping[str, Planned], past: Sequence[Record]) -> str:
    """What is different from the newest published step of this name."""
    old = next((record for record in reversed(past) if record.name == node.name and record.kind == node.kind), None)
    if old is None:
        return "it is new"
    reasons = []
    if changed := [key for key in difference(old.recipe, node.recipe) if key != "recipe_hash"]:
        reasons.append("changed: " + ", ".join(changed[:4]) + (" ..." if len(changed) > 4 else ""))
    elif difference(old.recipe, node.recipe):
        reasons.append("its configuration changed")
    if old.content != node.content:
        reasons.append("other files are read, or their content changed")
    for role, need in node.needs.items():
        if old.inputs.get(role) != before[need].node.key:
            reasons.append(f"reads the new {need}")
    return "; ".join(reasons) or "its inputs changed"


def _work(node: Node, before: Mapping[str, Planned]) -> float | None:
    """Bytes of input, or FLOPs; None: nothing to compare by."""
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
    """By the newest step of the kind, the one of the same name first."""
    alike = [record for record in past if record.kind == node.kind]
    alike.sort(key=lambda record: (record.name == node.name, record.finished))
    if not alike:
        return None
    if node.kind == "pipeline":
        old = sum(file[1] for file in alike[-1].content["files"])
        return alike[-1].seconds * (_work(node, before) or old) / max(old, 1)
    if node.kind == "train":
        config, _ = _training(node)
        scale = alike[-1].recipe["steps"] * alike[-1].recipe["batch"]["global_sequences"]
        return alike[-1].seconds * config.steps * config.batch.global_sequences / scale
    return alike[-1].seconds


def _storage(node: Node) -> int | None:
    if node.kind == "pipeline":
        return int(STORED_PER_INPUT_BYTE * sum(file[1] for file in node.content["files"]))
    if node.kind == "train":
        config, vocabulary = _training(node)
        return SAVED_BYTES * config.model.matmul_parameters(vocabulary) * (config.checkpoint.keep_last + 1)
    return None


def _gpu(node: Node) -> int | None:
    if node.kind != "train":
        return None
    config, vocabulary = _training(node)
    if not config.elastic.gpus_per_worker:
        return None
    split = config.parallel.unit * (config.elastic.min_workers // config.parallel.unit
                                    if config.parallel.data == "zero3" else 1)
    return STATE_BYTES * config.model.matmul_parameters(vocabulary) // max(split, 1)


def _training(node: Node) -> tuple[Any, int]:
    """Its configuration, and its vocabulary (32,000 where only the data will tell)."""
    from tidewheel.train.config import TrainConfig

    config = build(TrainConfig, node.entry["config"], where=node.name)
    return config, config.model.vocabulary_size or 32_000


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown: none ran yet"
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
