"""A small shard set, a checkpointer over one file, and a way to run the loop in two processes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.ranks import on_ranks
from tidewheel import storage
from tidewheel.config import build
from tidewheel.inference.sample import text_sample
from tidewheel.shards.format import shard_schema, write_shard
from tidewheel.shards.manifest import Manifest, write_manifest
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.parallel import local
from tidewheel.train.runtime import NoCheckpoints, NoControl, Runtime

LENGTH, VOCABULARY = 16, 128


def write_tokenizer(target: storage.Store) -> dict[str, Any]:
    """Write a tokenizer of letters with two special tokens, and return its description for a manifest."""
    from tokenizers import Tokenizer, models

    vocabulary = {"<|endoftext|>": 0, "<|pad|>": 1, **{chr(97 + i): 2 + i for i in range(26)}, " ": 28}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    stamp = target.write("tokenizer.json", tokenizer.to_str().encode())
    return {"file": "tokenizer.json", "hash": stamp.hash, "eos": 0, "pad": 1}


def write_shards(uri: str | Path, *, shards: int = 3, rows: int = 20, seed: int = 0, loss_mask: bool = False,
                 length: int = LENGTH, **changes: Any) -> Manifest:
    """Write a shard set of random rows, each with two documents and some with padding; tokens follow a simple rule."""
    target, random = storage.store(uri), np.random.default_rng(seed)
    infos, count = [], 0
    for _ in range(shards):
        tokens = (random.integers(2, 28, (rows, 1)) + np.arange(length)[None] * 3) % 26 + 2
        lengths = np.where(random.random(rows) < 0.3, length - 3, length).astype(np.int32)
        tokens[np.arange(length)[None] >= lengths[:, None]] = 1
        starts = [[0, int(random.integers(3, 9))] for _ in range(rows)]
        ids = [[f"doc{count + 2 * row}", f"doc{count + 2 * row + 1}"] for row in range(rows)]
        count += 2 * rows
        flat = pa.array(tokens.astype(np.uint16).ravel(), pa.uint16())
        columns = [pa.FixedSizeListArray.from_arrays(flat, length), pa.array(lengths), pa.array(starts),
                   pa.array(ids), pa.array([[0, 0]] * rows)]
        if loss_mask:  # tokens below 12 are to be learnt
            marked = (tokens < 12) & (tokens > 1)
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(marked.astype(np.uint8).ravel()), length))
        schema = shard_schema(length, "uint16", loss_mask)
        table = pa.table([column.cast(field.type) for column, field in zip(columns, schema)], schema=schema)
        infos.append(write_shard(target, table))
    fields: dict[str, Any] = {
        "sequence_length": length, "token_dtype": "uint16", "vocabulary_size": VOCABULARY,
        "tokenizer": write_tokenizer(target), "recipe_hash": "test", "evaluation_sets": (), "documents": count,
        "shards": tuple(infos), "loss_mask": loss_mask, **changes}
    manifest = Manifest(**fields)
    write_manifest(target, manifest)
    return manifest


def config(folder: Path, run: str = "run", *overrides: str) -> TrainConfig:
    """Return a configuration of 8 steps of 8 sequences in 4 virtual ranks over the set in `folder`."""
    values = {
        "run": {"id": run, "uri": str(folder / "runs")}, "steps": 8,
        "data": {"uri": str(folder / "shards"), "validation": str(folder / "validation"), "seed": 7},
        "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64, "init_std": 0.1,
                  "tie_embeddings": True},
        "optimizer": {"learning_rate": 3e-3, "clip_norm": 0.5}, "schedule": {"warmup_steps": 2},
        "batch": {"global_sequences": 8, "micro_sequences": 2, "virtual_ranks": 4},
        "evaluation": {"every_steps": 3, "sample_tokens": 5, "prompt": "abc"}, "checkpoint": {"every_steps": 3},
        "elastic": {"min_workers": 1, "max_workers": 2}}
    return build(TrainConfig, values, overrides)


class FileCheckpoints(NoCheckpoints):
    """Checkpoints that hold the whole state in one .npz file, written by rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load_latest(self, state: dict[str, Any], usable: Any = None) -> dict[str, Any] | None:
        if not self.path.exists():
            return None
        with np.load(self.path) as saved:
            for group, tensors in state.items():
                for name, tensor in tensors.items():
                    value = torch.from_numpy(saved[f"{group}/{name}"])
                    if isinstance(tensor, DTensor):
                        rank, size = dist.get_rank(), dist.get_world_size()
                        chunks = value.chunk(size)
                        value = chunks[rank] if rank < len(chunks) else value[:0]
                    local(tensor).copy_(value)
            return json.loads(str(saved["extra"]))

    def load_saved(self, state: dict[str, Any]) -> dict[str, Any] | None:
        return self.load_latest(state)

    def save(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        whole = {f"{group}/{name}": (t.full_tensor() if isinstance(t, DTensor) else t).numpy()
                 for group, tensors in state.items() for name, t in tensors.items()}
        if not dist.is_initialized() or dist.get_rank() == 0:
            np.savez(self.path, extra=json.dumps(extra), **whole)


class Replaced(Exception):
    """The end of a worker that is replaced."""


class Script(NoControl):
    """A control that requests a planned stop at step `leave`, or kills the worker after step `die`."""

    def __init__(self, leave: int = -1, die: int = -1) -> None:
        self.leave, self.die, self.step, self.events = leave, die, 0, []

    def poll(self) -> bool:
        self.step += 1
        return self.step == self.leave

    def hold(self, step: int) -> None:
        raise Replaced(f"after step {step}")

    def event(self, kind: str, **detail: Any) -> None:
        self.events.append((kind, detail))

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        if step == self.die:
            raise Replaced(f"died after step {step}")


def two_processes(config: TrainConfig, checkpoints: Path, generation: int = 0, leave: int = -1) -> None:
    """Run the loop in two gloo processes until it ends or is replaced."""
    on_ranks(2, _worker, config, checkpoints, generation, leave)


def _worker(config: TrainConfig, checkpoints: Path, generation: int, leave: int) -> None:
    from tidewheel.inference.answers import answer  # tests on GPUs have no package for chat templates

    runtime = Runtime(dist.get_rank(), 2, generation=generation, checkpoints=FileCheckpoints(checkpoints),
                      control=Script(leave=leave), sampler=text_sample, answerer=answer)
    with contextlib.suppress(Replaced):  # the end that the test requested
        train(config, runtime)
