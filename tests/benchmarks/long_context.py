"""Measure what long rows need: even attention, skipped blocks, a row of 131,072 tokens on 4 processes, less padding.

    python -m tests.benchmarks.long_context balance     # attention cost per context rank, before and after
    python -m tests.benchmarks.long_context blocks      # time of attention on a CPU, with and without skipped blocks
    python -m tests.benchmarks.long_context row [--tokens 131072] [--ranks 4] [--documents packed|one]
    python -m tests.benchmarks.long_context padding     # padding of fine-tuning batches, before and after

Document lengths are those of ../shared/corpus, at four bytes a token, and log-normal ones; for padding, those of
../shared/sft.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.models.attention import document_attention, document_mask
from tidewheel.models.decoder import next_tokens
from tidewheel.models.documents import Documents
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.length_groups import padded_length, similar_lengths
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.parallel import partition
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, train_step

SHARED = Path(__file__).resolve().parents[2] / "../shared"
BYTES_PER_TOKEN = 4
METHODS = ("all_gather", "all_to_all", "ring")


def corpus_lengths(most: int = 40_000) -> np.ndarray:
    """Return the lengths of documents of the shared corpus in their order, in tokens of `BYTES_PER_TOKEN` bytes."""
    lengths: list[int] = []
    for path in sorted((SHARED / "corpus").glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            lengths += [len(json.loads(line)["text"].encode()) // BYTES_PER_TOKEN + 1 for line in lines]
        if len(lengths) >= most:
            break
    return np.array(lengths, dtype=np.int64)


def lognormal_lengths(count: int = 20_000) -> np.ndarray:
    """Return synthetic lengths: median 1,097 tokens, mean 3,379."""
    return np.random.default_rng(0).lognormal(7.0, 1.5, count).astype(np.int64) + 1


def packed_rows(lengths: np.ndarray, length: int, most: int = 16) -> np.ndarray:
    """Return where the document of each position begins, [rows, length], of documents laid end to end and cut."""
    ends = np.cumsum(lengths)
    rows = min(most, int(ends[-1]) // length)
    cuts = np.arange(rows + 1) * length
    offsets = np.unique(np.concatenate((cuts, ends[ends < rows * length])))
    return partition.starts_of(offsets, rows, length)


def balance() -> None:
    """Print the attention cost of the busiest rank over the mean."""
    sets = {"log-normal": lognormal_lengths()}
    if (SHARED / "corpus").is_dir():
        sets["corpus"] = corpus_lengths()
    table = []
    for name, lengths in sets.items():
        for length, size in ((8192, 2), (8192, 4), (32768, 8), (131072, 4), (131072, 16)):
            for window in (None, 4096):
                starts = packed_rows(lengths, length)
                costs = partition.visible_keys(starts, [window])
                before, after = ([partition.imbalance(row[None], partition.divide(row[None], size, kind))
                                  for row in costs] for kind in ("zigzag", "documents"))
                lockstep = [[_lockstep(row[None], window, partition.divide(cost[None], size, kind))
                             for row, cost in zip(starts[:4], costs)] for kind in ("zigzag", "documents")]
                began = time.perf_counter()
                partition.divide(costs, size)
                seconds = time.perf_counter() - began
                table.append({
                    "documents": name, "row": length, "ranks": size, "window": window or "none", "rows": len(costs),
                    "zigzag, mean": f"{np.mean(before):.3f}", "zigzag, worst": f"{max(before):.3f}",
                    "documents, mean": f"{np.mean(after):.4f}", "documents, worst": f"{max(after):.4f}",
                    "zigzag, hops": f"{np.mean(lockstep[0]):.3f}", "documents, hops": f"{np.mean(lockstep[1]):.3f}",
                    "ms a row": f"{1000 * seconds / len(costs):.1f}"})
    print_table(table, title="Attention cost of the busiest context rank over the mean, of a row; hops: the same if "
                             "the ranks of a ring wait for each other after every hop")


def _lockstep(starts: np.ndarray, window: int | None, divided: np.ndarray) -> float:
    """Return the sum over hops of the busiest rank's attention cost, over the mean cost of a rank."""
    size, slowest, total = len(divided), 0.0, 0.0
    for hops in range(size):
        work = [partition.pairs(divided[rank], divided[(rank - hops) % size], starts, window) for rank in range(size)]
        slowest, total = slowest + max(work), total + sum(work)
    return slowest / (total / size)


def blocks(length: int = 4096) -> None:
    """Print the time of attention forward and backward on one core."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 64, generator=generator).requires_grad_() for heads in (4, 2, 2))
    grad = torch.randn(1, 4, length, 64, generator=generator)
    table = []
    for documents in (1, 4, 16):
        for window in (None, 512):
            segments = (torch.arange(length) * documents // length)[None]
            seconds = {}
            for kernel in ("masked", "blockwise"):
                mask = document_mask(segments, kernel, window=window)
                seconds[kernel] = _fastest(lambda mask=mask: torch.autograd.grad(
                    document_attention(q, k, v, mask), (q, k, v), grad))
            seen = int(document_mask(segments, "masked", window=window).dense.sum())  # type: ignore[union-attr]
            table.append({
                "documents": documents, "window": window or "none", "visible": f"{seen / length**2:.1%}",
                "masked, ms": f"{1000 * seconds['masked']:.0f}", "blockwise, ms": f"{1000 * seconds['blockwise']:.0f}",
                "ratio": f"{seconds['blockwise'] / seconds['masked']:.2f}"})
    print_table(table, title=f"Attention of 4 heads of 64 over {length:,} tokens, forward and backward, one core, fp32")


def _fastest(work: Callable[[], Any], times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def row(tokens: int, ranks: int, documents: str) -> None:
    """Train a step on one row with each method, and print seconds and memory of the largest rank."""
    with tempfile.TemporaryDirectory(prefix="tidewheel-long-") as folder:
        table = []
        for method in METHODS:
            on_ranks(ranks, _train_row, tokens, method, documents, folder)
            found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob(f"{method}-*.json"))]
            table.append({
                "method": method, "ranks": ranks, "loss": f"{found[0]['loss']:.6f}",
                "seconds a step": f"{max(rank['seconds'] for rank in found):.1f}",
                "peak memory, MiB": f"{max(rank['peak'] for rank in found):.0f}",
                "beyond the model, MiB": f"{max(rank['beyond'] for rank in found):.0f}"})
    print_table(table, title=f"A step on one row, {tokens:,} tokens ({documents}), {ranks} processes, width 128")
    losses = [float(line["loss"]) for line in table]
    if max(losses) - min(losses) > 1e-5 * max(losses):
        raise SystemExit(f"the methods disagree: {losses}")


def _train_row(tokens: int, method: str, documents: str, folder: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = build(TrainConfig, {
        "model": {"dim": 128, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 256, "qk_norm": False,
                  "max_sequence_length": tokens, "tie_embeddings": True},
        "batch": {"global_sequences": 1, "micro_sequences": 1, "virtual_ranks": 1},
        "parallel": {"context": ranks, "context_method": method}, "elastic": {"max_workers": ranks}})
    runtime = Runtime(rank, ranks)
    model = parallel.build(config, 256, runtime)
    parallel.init_weights(model, seed=0)
    optimizer, collectives = build_optimizer(model, config.optimizer), Collectives(runtime)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.perf_counter()
    result = train_step(model, optimizer, [_micro_batch(tokens, documents)], collectives, virtual_ranks=1)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path(folder, f"{method}-{rank}.json").write_text(json.dumps(
        {"loss": result.loss, "seconds": seconds, "peak": peak, "beyond": peak - before}))


def _micro_batch(tokens: int, documents: str) -> MicroBatch:
    random = np.random.default_rng(1)
    lengths = lognormal_lengths() if documents == "packed" else np.array([tokens])
    starts = packed_rows(lengths, tokens, most=1)
    segments = torch.from_numpy(np.cumsum(starts == np.arange(tokens), axis=1) - 1)
    ids = torch.from_numpy(random.integers(0, 256, (1, tokens)))
    targets = next_tokens(ids, segments)
    return MicroBatch(ids, torch.arange(tokens)[None] - torch.from_numpy(starts), segments, targets, 0, tokens,
                      int((targets >= 0).sum()), Documents.of(segments))


def padding(length: int = 2048, sequences: int = 64, micro: int = 4, virtual: int = 4) -> None:
    """Print the share of padding in batches of unpacked rows."""
    table = []
    for name, lengths in _unpacked_lengths(length):
        batches = lengths[:len(lengths) // sequences * sequences].reshape(-1, sequences)
        padded: dict[str, int] = {"rows of the set": batches.size * length, "longest of a micro-batch": 0, "grouped": 0}
        for batch in batches:
            grouped = batch[similar_lengths(batch, micro, virtual)]
            for kind, order in (("longest of a micro-batch", batch), ("grouped", grouped)):
                padded[kind] += sum(micro * padded_length(part, 64, length) for part in order.reshape(-1, micro))
        line = {"set": name, "sequences": batches.size, "median": int(np.median(batches)), "longest": batches.max()}
        table.append(line | {kind: f"{1 - batches.sum() / count:.1%}" for kind, count in padded.items()})
    print_table(table, title=f"Share of padding: global batches of {sequences}, micro-batches of {micro}, rows of "
                             f"{length:,}, multiples of 64")


def _unpacked_lengths(length: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "log-normal", np.minimum(np.random.default_rng(0).lognormal(5.5, 1.0, 4096).astype(np.int64) + 1, length)
    for name in ("dolly_instructions", "gsm8k_train", "oasst_sample"):
        path = SHARED / "sft" / f"{name}.jsonl.gz"
        if path.exists():
            with gzip.open(path, "rt") as lines:
                texts = [line for line in lines if line.strip()]
            sizes = np.array([len(text.encode()) // BYTES_PER_TOKEN + 1 for text in texts])
            yield name, np.minimum(sizes, length)[np.random.default_rng(0).permutation(len(sizes))]


def main() -> int:
    """Run one of the measurements."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=("balance", "blocks", "row", "padding"))
    arguments.add_argument("--tokens", type=int, default=131_072)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--documents", choices=("packed", "one"), default="packed")
    chosen = arguments.parse_args()
    if chosen.what == "row":
        row(chosen.tokens, chosen.ranks, chosen.documents)
    else:
        {"balance": balance, "blocks": blocks, "padding": padding}[chosen.what]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
