"""Micro-batches of sequences of similar length, for sets whose rows hold one document each (fine-tuning).

A global batch has the same sequences with and without it, and takes the same place in the order of the data: only their
distribution over the micro-batches of the step changes. It depends on the lengths alone, not on the number of workers.
"""

from __future__ import annotations

import numpy as np

from tidewheel.shards.reader import Rows


def similar_lengths(lengths: np.ndarray, micro_sequences: int, virtual_ranks: int) -> np.ndarray:
    """Return the order in which the sequences of a global batch fill its micro-batches, int64 [n].

    Micro-batches are formed of the sorted lengths, the longest first. They are dealt to the virtual ranks in turn, so
    that the ranks compute micro-batches of similar length at the same time, and the same number of tokens in a step.

    Args:
        lengths: tokens of each sequence, [n], a multiple of micro_sequences x virtual_ranks.
        micro_sequences: of a micro-batch.
        virtual_ranks: of the run.
    """
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    return by_length.reshape(-1, virtual_ranks, micro_sequences).swapaxes(0, 1).reshape(-1)


def longest(rows: Rows) -> np.ndarray:
    """Return the tokens of each row, [B]; of a row of several parts, those of the longest."""
    if rows.parts == 1:
        return rows.lengths
    return (rows.segment_ids.reshape(-1, rows.parts, rows.width) >= 0).sum(axis=2).max(axis=1)


def padded_length(lengths: np.ndarray, multiple: int, most: int) -> int:
    """Return the length to which rows are padded: that of the longest, rounded up.

    Args:
        lengths: tokens of each row.
        multiple: round up to a multiple of this; 0: pad to `most`.
        most: tokens of a row of the set.
    """
    return most if not multiple else min(most, -(-int(lengths.max()) // multiple) * multiple)


def cut(rows: Rows, part: slice, length: int) -> Rows:
    """Return some of the rows, whose parts are cut to `length` tokens.

    Args:
        rows: rows of the set.
        part: which of them.
        length: not below that of the longest.
    """
    def shorter(values: np.ndarray) -> np.ndarray:
        split = values[part].reshape(-1, rows.parts, rows.width)[:, :, :length]
        return split.reshape(-1, rows.parts * length)

    def shorter_if_read(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else shorter(values)

    def chosen_if_read(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[part]

    return Rows(shorter(rows.tokens), rows.lengths[part], shorter(rows.segment_ids), shorter(rows.positions),
                rows.ids[part], shorter_if_read(rows.loss_mask), rows.parts, chosen_if_read(rows.reference),
                None if rows.teacher is None else rows.teacher.cut(part, length), chosen_if_read(rows.margins),
                chosen_if_read(rows.desirable), shorter_if_read(rows.sampled), shorter_if_read(rows.referred),
                chosen_if_read(rows.advantages) if rows.advantages is None or rows.advantages.ndim == 1
                else shorter(rows.advantages), shorter_if_read(rows.step_labels),
                shorter_if_read(rows.values), shorter_if_read(rows.returns))
