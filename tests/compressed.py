"""Sum compressed gradients with all slots in one process: each slot is a worker of its own, and nothing is sent."""

from __future__ import annotations

from typing import Any

import torch

from tidewheel.train.compression import At, Compression, Gather, Sum, Swap


def answers(messages: list[Any]) -> list[Any]:
    """Return what each slot, in a worker of its own, gets back."""
    sent = [message.tensors for message in messages]
    slots = range(len(messages))
    if isinstance(messages[0], Sum):
        return [sum(tensor[0] for (tensor,) in sent)] * len(messages)
    if isinstance(messages[0], Gather):
        return [tuple(torch.cat(parts) for parts in zip(*sent))] * len(messages)
    assert isinstance(messages[0], Swap)
    return [tuple(torch.stack([part[0, slot] for part in parts])[:, None] for parts in zip(*sent)) for slot in slots]


def summed(part: Compression, values: torch.Tensor, shape: tuple[int, ...], *, count: int = 0,
           state: list[dict[str, torch.Tensor]] | None = None) -> tuple[torch.Tensor, torch.Tensor, list[At]]:
    """Return the sum of [S, n], what stays behind [S, n], and the `At` of each slot."""
    slots = len(values)
    rows = [values[slot:slot + 1].clone() for slot in range(slots)]
    ats = [At("w", shape, count, 5, range(slot, slot + 1), slots, state[slot] if state else part.state("w", shape, 5))
           for slot in range(slots)]
    exchanges = [part.sum(row, at) for row, at in zip(rows, ats)]
    replies: list[Any] = [None] * slots
    totals: list[torch.Tensor] = []
    while not totals:
        messages = []
        for exchange, reply in zip(exchanges, replies):
            try:
                messages.append(exchange.send(reply))
            except StopIteration as end:
                totals.append(end.value)
        if messages:
            replies = answers(messages)
    assert len(totals) == slots
    for total in totals:  # all workers have the same sum
        torch.testing.assert_close(total, totals[0], rtol=0, atol=0, equal_nan=True)
    return totals[0], torch.cat(rows), ats
