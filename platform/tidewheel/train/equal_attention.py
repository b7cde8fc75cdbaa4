"""Micro-batches of packed sequences whose attention costs the same.

A packed row has a fixed number of tokens, but attention stays inside documents: a row of one long document costs many
times that of a row of short ones. Workers then wait for the one with the long documents. The global batch keeps its
sequences; only their distribution over the micro-batches of the step changes. It depends on the documents alone, not on
the number of workers.
"""

from __future__ import annotations

import heapq

import numpy as np


def equal_costs(costs: np.ndarray, micro_sequences: int, virtual_ranks: int) -> np.ndarray:
    """Return the order in which the sequences of a global batch fill its micro-batches, int64 [n].

    Sequences go to virtual ranks, the costliest first, each to the one with the least cost that has room (longest
    processing time first, Graham 1969, doi:10.1137/0117039), and those of a virtual rank likewise to its micro-batches.
    All virtual ranks compute their costliest micro-batches at the same time.

    Args:
        costs: of each sequence, [n], a multiple of micro_sequences x virtual_ranks.
        micro_sequences: of a micro-batch.
        virtual_ranks: of the run.
    """
    order = []
    for sequences in _filled(costs, virtual_ranks).reshape(virtual_ranks, -1):
        micro_batches = sequences[_filled(costs[sequences], len(sequences) // micro_sequences)]
        micro_batches = micro_batches.reshape(-1, micro_sequences)
        costliest_first = np.argsort(-costs[micro_batches].sum(axis=1), kind="stable")
        order.append(micro_batches[costliest_first].reshape(-1))
    return np.concatenate(order)


def _filled(costs: np.ndarray, bins: int) -> np.ndarray:
    """Return the items of each bin, int64 [n], bin after bin, the costliest item of a bin first.

    Args:
        costs: of each item, [n].
        bins: number of bins, each of which holds n / bins items.
    """
    held: list[list[int]] = [[] for _ in range(bins)]
    room = [(0.0, number) for number in range(bins)]
    for item in np.argsort(-costs, kind="stable").tolist():
        cost, number = heapq.heappop(room)
        held[number].append(item)
        if len(held[number]) < len(costs) // bins:
            heapq.heappush(room, (cost + float(costs[item]), number))
    return np.array(held, dtype=np.int64).reshape(-1)
