"""Compare tokenizing and packing with bare `tokenizers.encode_batch` on the same texts and threads, in one process.

    python -m tests.benchmarks.tokenize [--megabytes 4] [--rounds 5] [--threads 1]

Tidewheel's side is a whole unit of the pack stage: it reads documents from storage, encodes, packs and counts them, and
writes shards. The peer is one call over a list of strings in memory, whose result is discarded. Times are CPU time, and
the rounds alternate.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[3] / "shared"


def main() -> int:
    """Measure, print the table and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--megabytes", type=float, default=4)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)  # for both sides; the library reads it when it first runs
    if not SHARED.exists():
        print("needs ../shared/corpus and ../shared/tokenizer")
        return 2
    texts = _texts(options.megabytes * 1e6)
    with tempfile.TemporaryDirectory(prefix="tw-tokenize-") as folder:
        _compare(texts, folder, options.rounds, options.threads)
    return 0


def _texts(size: float) -> list[str]:
    texts: list[str] = []
    for path in sorted((SHARED / "corpus").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                texts.append(json.loads(line)["text"])
                size -= len(texts[-1].encode())
                if size <= 0:
                    return texts
    return texts


def _compare(texts: list[str], folder: str, rounds: int, threads: int) -> None:
    from tokenizers import Tokenizer

    from tidewheel.console import print_table

    bare = Tokenizer.from_file(str(SHARED / "tokenizer" / "tokenizer.json"))
    unit = _unit(texts, folder)
    ways: dict[str, Callable[[], Any]] = {
        "tokenizers.encode_batch": lambda: bare.encode_batch(texts, add_special_tokens=False),
        "tokenizers.encode_batch_fast": lambda: bare.encode_batch_fast(texts, add_special_tokens=False),
        "tokenize + pack": unit,
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    unit()  # compiles the kernels
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.process_time()
            way()
            spent[name].append(time.process_time() - began)
    size = sum(len(text.encode()) for text in texts)
    rows = []
    for name, own in spent.items():
        ratio = statistics.median(peer / mine for peer, mine in zip(spent["tokenizers.encode_batch"], own, strict=True))
        rows.append({"what": name, "CPU seconds": f"{statistics.median(own):.2f}",
                     "MB per CPU second": f"{size / 1e6 / statistics.median(own):.2f}",
                     "against encode_batch": f"{100 * ratio:.0f} %"})
    print_table(rows, title=f"{len(texts):,} documents, {size / 1e6:.1f} MB, {threads} thread(s), median of {rounds}")


def _unit(texts: list[str], folder: str) -> Callable[[], Any]:
    """Return the pack stage's unit for one partition that holds `texts`."""
    import pyarrow as pa

    from tidewheel.config import build
    from tidewheel.data.config import PipelineConfig
    from tidewheel.data.document import DOCUMENT_SCHEMA
    from tidewheel.data.stage import write_ipc
    from tidewheel.data.stages import pack
    from tidewheel.data.stages.job import Job
    from tidewheel.data.stages.partition import Part
    from tidewheel.storage import store

    target = store(folder)
    names = sorted(f"doc-{index:07d}" for index in range(len(texts)))
    table = pa.table([names, texts, ["benchmark"] * len(texts), ["{}"] * len(texts)], schema=DOCUMENT_SCHEMA)
    with target.writer("documents") as sink:
        write_ipc(sink, table)
    tokenizer = target.write("tokenizer", (SHARED / "tokenizer" / "tokenizer.json").read_bytes())
    config = build(PipelineConfig, {"read": {"paths": ["-"]}, "steps": [
        {"tokenize": {"file": "tokenizer"}}, {"pack": {"sequence_length": 2048}}]})
    job = Job(config, folder, folder, (), 1, (), b"")
    task = pack.tasks(job, [Part(0, sink.stamp, sink.stamp, (), len(texts))], tokenizer)[0]
    return lambda: pack.pack_part(task)


if __name__ == "__main__":
    sys.exit(main())
