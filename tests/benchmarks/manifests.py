"""Measure what a checkpoint's manifest costs over the number of ranks, and what torch's own planner costs beside it.

    python -m tests.benchmarks.manifests [--ranks 8 64 1024 4096]

The state is that of an 8B with AdamW in fp32, its parameters and both moments sharded over all ranks (ZeRO-3). Only
shapes are used. The rules, the manifest and the plans are made by the code of `checkpoint`; no rank is started and no
tensor is stored. Lists of parts, which the manifest had before, and torch.distributed.checkpoint's global plan, which a
save made before, are measured up to `MOST_LISTED` ranks. The exit code is 1 if a rank's plan does not have all its
bytes, or if the manifest of the most ranks takes more than `MOST_SECONDS` of processor time to read.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tidewheel.checkpoint.agreement import Row, shared_by
from tidewheel.checkpoint.manifest import CheckpointManifest, parse_manifest
from tidewheel.checkpoint.safetensors_head import part_name, safetensors_head
from tidewheel.checkpoint.sharding import Cut, Sharding
from tidewheel.checkpoint.tensor_entry import RankFile, TensorEntry, own_parts
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.models.decoder import Decoder
from tidewheel.train.config import TrainConfig

T = TypeVar("T")
VOCABULARY = 128_256
MOST_LISTED = 1024
MOST_SECONDS = 0.5
HASH = "blake3-" + "0" * 64


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `work` and the seconds of processor time that it took."""
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def tensors_of(preset: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a checkpoint: parameters and both moments of AdamW, by path."""
    model = build(TrainConfig, {"model": {"preset": preset}}).model
    with torch.device("meta"):
        parameters = dict(Decoder(model, VOCABULARY).named_parameters())
    paths = ("model/{}", "optimizer/{}.exp_avg", "optimizer/{}.exp_avg_sq")
    return {path.format(name): tuple(parameter.shape) for path in paths for name, parameter in parameters.items()}


def describe(tensors: dict[str, tuple[int, ...]], ranks: int) -> dict[str, TensorEntry]:
    """Return the rules as a save agrees on them: from the table that all ranks have."""
    table = tuple(Row(name, "float32", shape, (Cut(0, ranks, 1),), (), 0) for name, shape in sorted(tensors.items()))
    return shared_by([(table, range(ranks))])


def head_bytes(entries: dict[str, TensorEntry], rank: int) -> tuple[int, int]:
    """Return the length of the header of a rank's file, and of the file."""
    parts = own_parts(entries, rank)
    head, _ = safetensors_head((part_name(path, entries[path].shape, box.offsets, box.sizes), "float32", box.sizes)
                               for path, box in parts.items())
    return len(head), len(head) + sum(box.elements for box in parts.values()) * 4


def files_of(entries: dict[str, TensorEntry], ranks: int) -> tuple[RankFile, ...]:
    """Return the files of all ranks."""
    files = []
    for rank in range(ranks):
        head, length = head_bytes(entries, rank)
        files.append(RankFile(f"rank_{rank:05d}-g3000001-0123abcd.safetensors", length, HASH, rank, head))
    return tuple(files)


def read_plan(manifest: CheckpointManifest, ranks: int) -> int:
    """Plan what the middle one of `ranks` ranks reads; return the bytes that it finds more or less than it needs."""
    rank, found, needed = ranks // 2, 0, 0
    for name, entry in manifest.tensors.items():
        own = Sharding(entry.shape, (Cut(0, ranks, 1),)).on(rank)
        if own is None:
            continue
        needed += own.elements * entry.itemsize
        for chunk in manifest.chunks(name, own):
            common = own.common(chunk.box)
            assert common is not None
            found += common.elements * entry.itemsize
    return abs(found - needed)


def listed(manifest: CheckpointManifest) -> bytes:
    """Return the same manifest with a list of all parts, as format 1 had."""
    entries = {name: TensorEntry(entry.dtype, entry.shape, tuple(manifest.chunks(name)))
               for name, entry in manifest.tensors.items()}
    return replace(manifest, tensors=entries).to_json()


def torch_plan(tensors: dict[str, tuple[int, ...]], ranks: int) -> tuple[float, int]:
    """Return the processor time of torch's global plan of a save, on one rank, and the pickled bytes it receives."""
    plans, received = [], 0
    properties = TensorProperties(dtype=torch.float32)
    for rank in range(ranks):
        items = []
        for name, shape in tensors.items():
            box = Sharding(shape, (Cut(0, ranks, 1),)).on(rank)
            if box is not None:
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                items.append(WriteItem(MetadataIndex(name, torch.Size(box.offsets)), WriteItemType.SHARD,
                                       tensor_data=TensorWriteData(chunk, properties, torch.Size(shape))))
        plans.append(SavePlan(items))
        received += len(pickle.dumps(plans[-1]))
    _, seconds = timed(lambda: create_default_global_save_plan(plans))
    return seconds, received


def measure(tensors: dict[str, tuple[int, ...]], ranks: int) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return a row of the table of rules, one of the table of lists, and what is wrong."""
    entries, agreeing = timed(lambda: describe(tensors, ranks))
    manifest = CheckpointManifest(100, ranks, 0.0, files_of(entries, ranks), entries, {}, 3_000_001)
    text, writing = timed(manifest.to_json)
    again, reading = timed(lambda: parse_manifest(text, "step_00000100", "here"))
    wrong, planning = timed(lambda: read_plan(again, max(1, ranks * 3 // 4)))
    row = {"ranks": ranks, "manifest, MB": round(len(text) / 1e6, 2), "rules, ms": milliseconds(agreeing),
           "write, ms": milliseconds(writing), "read, ms": milliseconds(reading),
           "plan of a rank, ms": milliseconds(planning)}
    problems = [f"{ranks} ranks: a rank's plan is {wrong} bytes off"] * (wrong > 0)
    problems += [f"{ranks} ranks: reading takes {reading:.2f} s"] * (reading > MOST_SECONDS)
    return row, listed_row(manifest, tensors, ranks) if ranks <= MOST_LISTED else {}, problems


def listed_row(manifest: CheckpointManifest, tensors: dict[str, tuple[int, ...]], ranks: int) -> dict[str, Any]:
    """Return the costs of lists of parts and of torch's plan."""
    text, writing = timed(lambda: listed(manifest))
    again, reading = timed(lambda: parse_manifest(text, "step_00000100", "here"))
    parts = sum(len(entry.chunks) for entry in again.tensors.values())
    planning, received = torch_plan(tensors, ranks)
    return {"ranks": ranks, "parts": parts, "list, MB": round(len(text) / 1e6, 2), "write, ms": milliseconds(writing),
            "read, ms": milliseconds(reading), "torch's plan, ms": milliseconds(planning),
            "torch's plans, MB": round(received / 1e6, 2)}


def milliseconds(seconds: float) -> float:
    """Return milliseconds, as the tables show them."""
    return round(1e3 * seconds, 1)


def main() -> int:
    """Print both tables, and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 4096])
    arguments.add_argument("--preset", default="8b")
    options = arguments.parse_args()
    tensors = tensors_of(options.preset)
    rows, lists, problems = [], [], list[str]()
    for ranks in options.ranks:
        row, of_lists, wrong = measure(tensors, ranks)
        rows.append(row)
        lists += [of_lists] if of_lists else []
        problems += wrong
    print_table(rows, title=f"{len(tensors)} tensors of a {options.preset}, each with a rule; processor time")
    if lists:
        print_table(lists, title="the same with a list of parts, and torch.distributed.checkpoint's plan of a save")
    for problem in problems:
        print(problem)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
