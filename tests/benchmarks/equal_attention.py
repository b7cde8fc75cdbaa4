"""Measure how unevenly attention falls on workers, in the order of the data and with `batch.equal_attention`.

    python -m tests.benchmarks.equal_attention [--rows 16384] [--length 8192] [--workers 8 64] [--data SHARDS]

Without --data, documents have lengths from a log-normal distribution like that of web text (median 600 tokens, mean
1,200), and are packed first-fit into rows of --length tokens. With it, the rows are those of a shard set. Each step
takes 2 rows for each micro-batch and 4 micro-batches for each worker.

`slowest` is the pairs of tokens that attention computes on the slowest worker, divided by the mean over workers; all
wait for that one. `limit` is the least that any distribution of equally many rows could reach: the costliest row of a
step beside the cheapest ones. `micro-batch` is the same as `slowest` of the micro-batches that workers compute at the
same time, for layouts that exchange after each. `step` is how much longer a step takes than with even work, for a Llama
of 8 billion parameters, of whose operations attention is a share that follows from the row length. The exit code is 1
if the slowest worker has more than 4 % above the limit with equal attention.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from tidewheel.console import print_table
from tidewheel.shards.source import SourceReader, open_source
from tidewheel.train.equal_attention import equal_costs

MICRO_SEQUENCES, PARTS = 2, 4
BOUND = 1.04
DIM, LAYERS, PARAMETERS = 4096, 32, 8.0e9


def packed(rows: int, length: int) -> np.ndarray:
    """Return the pairs of tokens of rows that documents fill first-fit, int64 [rows]."""
    random = np.random.default_rng(0)
    pairs, room = np.zeros(rows, dtype=np.int64), np.full(rows, length)
    row = 0
    while row < rows:
        size = int(np.clip(random.lognormal(np.log(600), 1.18), 16, length))
        fits = np.flatnonzero(room[row:row + 64] >= size)  # of the rows that are open
        if len(fits) == 0:
            row += 1
            continue
        place = row + int(fits[0])
        pairs[place] += size * (size + 1) // 2
        room[place] -= size
        row += int(room[row] < 16)
    return pairs


def unevenness(costs: np.ndarray, workers: int, balanced: bool) -> tuple[float, float]:
    """Return the mean over steps of slowest / mean, of workers in a step and of micro-batches at the same time."""
    step = workers * PARTS * MICRO_SEQUENCES
    of_workers, of_micros = [], []
    for begin in range(0, len(costs) - step + 1, step):
        batch = costs[begin:begin + step]
        if balanced:
            batch = batch[equal_costs(batch, MICRO_SEQUENCES, workers)]
        micros = batch.reshape(workers, PARTS, MICRO_SEQUENCES).sum(axis=2)
        of_workers.append(micros.sum(axis=1).max() / micros.sum(axis=1).mean())
        of_micros.append(micros.max(axis=0).sum() / micros.mean(axis=0).sum())
    return float(np.mean(of_workers)), float(np.mean(of_micros))


def limit(costs: np.ndarray, workers: int) -> float:
    """Return the mean over steps of the least possible slowest / mean, of workers with equally many rows."""
    step, of_steps = workers * PARTS * MICRO_SEQUENCES, []
    for begin in range(0, len(costs) - step + 1, step):
        batch = np.sort(costs[begin:begin + step])
        costliest = batch[-1] + batch[:PARTS * MICRO_SEQUENCES - 1].sum()
        of_steps.append(max(1.0, costliest / (batch.sum() / workers)))
    return float(np.mean(of_steps))


def attention_share(costs: np.ndarray, length: int) -> float:
    """Return the share of attention in the operations of a forward pass: 4 D for each pair of tokens and layer."""
    attention = 4.0 * DIM * LAYERS * float(costs.mean())
    return attention / (attention + 2.0 * PARAMETERS * length)


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a row, without --data")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--data", default="", help="a shard set")
    options = parser.parse_args()
    length = options.length
    if options.data:
        source = open_source(options.data, None, 0)
        reader = SourceReader(source)
        length = source.manifest.sequence_length
        costs = reader.attention_pairs(np.arange(min(options.rows, source.manifest.rows)))
        reader.close()
    else:
        costs = packed(options.rows, length)
    share = attention_share(costs, length)
    rows: list[dict[str, Any]] = []
    worst = 0.0
    for workers in options.workers:
        for balanced in (False, True):
            slowest, micro = unevenness(costs, workers, balanced)
            least = limit(costs, workers)
            worst = max(worst, slowest / least if balanced else 0.0)
            rows.append({"workers": workers, "micro-batches": "equal attention" if balanced else "in order",
                         "slowest": f"{slowest:.3f}", "limit": f"{least:.3f}", "micro-batch": f"{micro:.3f}",
                         "step": f"{share * (slowest - 1):+.1%}"})
    print_table(rows, title=f"rows of {length} tokens; attention is {share:.1%} of the operations")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
