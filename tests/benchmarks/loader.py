"""Compare the loader's tokens per second and resume time with mosaicml-streaming on the same data.

    python -m tests.benchmarks.loader [--streaming-python PATH] [--rows 16384] [--length 2048] [--batch 32] [--rounds 5]

PATH is a Python with mosaicml-streaming (`python -m venv V && V/bin/pip install mosaicml-streaming`). Both read in
shuffled order from a warm page cache and return [B, L] int64 tensors; Tidewheel's loader also returns segment ids,
positions and sequence ids. The exit code is 1 unless it reads five times as fast as the peer's best, and reaches the
first batch at any position in less than 100 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from tidewheel import storage
from tidewheel.console import print_table
from tidewheel.shards.format import shard_schema, write_shard
from tidewheel.shards.loader import Loader
from tidewheel.shards.manifest import Manifest, write_manifest
from tidewheel.shards.source import SourceReader, open_source
from tidewheel.train.batches import micro_batch

SHARD_ROWS, DOCUMENT = 2048, 512
WANTED_RATIO, WANTED_SECONDS = 5.0, 0.1
VOCABULARY = 50_176


@dataclass(frozen=True)
class Rate:
    """Speed of one way to read."""

    name: str
    wall: list[float]
    """Tokens per second of each round."""
    cpu: list[float]
    """Tokens per CPU second of each round."""


def main() -> int:
    """Measure both loaders, print the tables and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--streaming-python", default="")
    arguments.add_argument("--rows", type=int, default=16384)
    arguments.add_argument("--length", type=int, default=2048)
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tw-loader-") as folder:
        tokens = np.random.default_rng(0).integers(2, 50_000, (options.rows, options.length), dtype=np.uint16)
        uri = str(Path(folder, "shards"))
        write_shards(uri, tokens)
        rates = [_rate("Tidewheel, rows", options, lambda: _read(uri, options, as_batches=False)),
                 _rate("Tidewheel, micro-batches with targets", options, lambda: _read(uri, options, as_batches=True))]
        resumes = _resumes(uri, options)
        peer = _peer(options, tokens, folder) if options.streaming_python else {}
    for workers, rounds in peer.get("read", {}).items():
        name = f"mosaicml-streaming, {workers} worker processes"
        rates.append(Rate(name, [count / wall for wall, _, count in rounds], [count / cpu for _, cpu, count in rounds]))
    best = {kind: max((statistics.median(getattr(rate, kind)) for rate in rates[2:]), default=0.0)
            for kind in ("wall", "cpu")}
    print_table([_row(rate, best) for rate in rates],
                title=f"{options.rows:,} rows of {options.length} tokens, batches of {options.batch}")
    print(f"resume at a position never read before: {1000 * statistics.median(resumes):.1f} ms, "
          f"worst of {len(resumes)} {1000 * max(resumes):.1f} ms")
    if not peer:
        print("no peer: give --streaming-python an interpreter that has mosaicml-streaming")
        return int(max(resumes) > WANTED_SECONDS)
    print(f"mosaicml-streaming: {1000 * statistics.median(peer['resume']):.1f} ms, "
          f"worst {1000 * max(peer['resume']):.1f} ms")
    ratio = statistics.median(rates[0].wall) / best["wall"]
    print(f"{ratio:.1f} times the peer's best (asked for: {WANTED_RATIO:g})")
    return int(ratio < WANTED_RATIO or max(resumes) > WANTED_SECONDS)


def write_shards(uri: str, tokens: np.ndarray, *, vocabulary: int = VOCABULARY, document: int = DOCUMENT) -> None:
    """Write a shard set of the rows of `tokens`, each cut into documents of `document` tokens."""
    target, length = storage.store(uri), tokens.shape[1]
    schema, infos = shard_schema(length, "uint16", False), []
    starts = list(range(0, length, document))
    for first in range(0, len(tokens), SHARD_ROWS):
        part = tokens[first:first + SHARD_ROWS]
        columns = [pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), length),
                   pa.array([length] * len(part)), pa.array([starts] * len(part)),
                   pa.array([[f"d{first + row}-{start}" for start in starts] for row in range(len(part))]),
                   pa.array([[0] * len(starts)] * len(part))]
        cast = [column.cast(field.type) for column, field in zip(columns, schema)]
        infos.append(write_shard(target, pa.table(cast, schema=schema)))
    stamp = target.write("tokenizer.json", b"{}")
    write_manifest(target, Manifest(
        sequence_length=length, token_dtype="uint16", vocabulary_size=vocabulary, recipe_hash="benchmark",
        tokenizer={"file": "tokenizer.json", "hash": stamp.hash, "eos": 0, "pad": 1}, evaluation_sets=(),
        documents=len(tokens) * len(starts), shards=tuple(infos)))


def _loader(uri: str, prefetch: int = 2) -> Loader:
    return Loader(SourceReader(open_source(uri, None, 0)), prefetch=prefetch)


def _read(uri: str, options: Any, *, as_batches: bool) -> tuple[float, float, int]:
    """Return the wall seconds, CPU seconds and tokens of one epoch without its first batch."""
    loader, device = _loader(uri), torch.device("cpu")
    loader.batch(np.arange(options.batch))
    tokens, wall, cpu = 0, time.perf_counter(), time.process_time()
    for start in range(options.batch, options.rows - options.batch + 1, options.batch):
        rows = loader.batch(np.arange(start, start + options.batch))
        if as_batches:
            tokens += micro_batch(rows, slice(None), 0, device).tokens.numel()
        else:
            tokens += torch.from_numpy(rows.tokens.astype(np.int64)).numel()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    loader.close()
    return wall, cpu, tokens


def _rate(name: str, options: Any, work: Any) -> Rate:
    work()  # fills the page cache and imports modules
    rounds = [work() for _ in range(options.rounds)]
    return Rate(name, [count / wall for wall, _, count in rounds], [count / cpu for _, cpu, count in rounds])


def _resumes(uri: str, options: Any) -> list[float]:
    """Return the seconds from opening the set to the first batch, at random positions in the first thousand epochs."""
    seconds = []
    for start in np.random.default_rng(1).integers(0, 1000 * options.rows, 50).tolist():
        began = time.perf_counter()
        loader = _loader(uri)
        loader.batch(np.arange(start, start + options.batch))
        seconds.append(time.perf_counter() - began)
        loader.close()
    return seconds


def _peer(options: Any, tokens: np.ndarray, folder: str) -> dict[str, Any]:
    rows, request = Path(folder, "rows.npy"), Path(folder, "request.json")
    np.save(rows, tokens)
    epoch = options.rows // options.batch
    request.write_text(json.dumps({
        "rows": str(rows), "folder": str(Path(folder, "mds")), "batch": options.batch, "rounds": options.rounds,
        "workers": [0, 1, 2], "resumes": [1, epoch // 3, epoch // 2, epoch - 2]}))
    command = [options.streaming_python, "-P", str(Path(__file__).with_name("loader_peer.py")), str(request)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=1800)  # -P: a file here is named tokenize
    if answer.returncode:
        sys.exit(f"the peer failed:\n{answer.stderr[-3000:]}")
    return json.loads(answer.stdout.splitlines()[-1])


def _row(rate: Rate, best: dict[str, float]) -> dict[str, str]:
    wall, cpu = statistics.median(rate.wall), statistics.median(rate.cpu)
    row = {"": rate.name, "M tokens/s": f"{wall / 1e6:.1f}", "M tokens per CPU second": f"{cpu / 1e6:.1f}"}
    if best["wall"]:
        row["against the peer's best"] = f"{wall / best['wall']:.1f} x"
    return row


if __name__ == "__main__":
    sys.exit(main())
