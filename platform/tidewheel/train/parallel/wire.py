"""Send the messages of compressed gradients: those of many parameters in one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tidewheel.train.compression import Exchange, Gather, Message, Sum, Swap
from tidewheel.train.parallel.traffic import Traffic

ALIGNED = 8
"""Bytes of a piece are a multiple of this, so that every piece can be read as any type."""
Answer = Callable[[], Any]
"""Waits for the answer to a message and returns it."""


class Wire:
    """Exchanges messages among the slots of all ranks of a group.

    Args:
        group: process group of the ranks; None: this rank alone.
        ranks: number of ranks.
        slots: slots of this rank. All ranks have as many, in the order of the ranks.
        traffic: counts bytes.
        ordered: add up in the order of the slots, so that the bits do not depend on the number of ranks.
    """

    def __init__(self, group: Any, ranks: int, slots: range, traffic: Traffic, *, ordered: bool) -> None:
        self._group, self._ranks, self._own, self._all = group, ranks, len(slots), len(slots) * ranks
        self._traffic, self._ordered = traffic, ordered

    def driven(self, exchange: Exchange) -> Exchange:
        """Return an exchange without `Sum` messages if sums have an order: a swap, an addition and a gather instead."""
        if not self._ordered:
            return exchange
        return self._in_order(exchange)

    def _in_order(self, exchange: Exchange) -> Exchange:
        answer: Any = None
        while True:
            try:
                message = exchange.send(answer)
            except StopIteration as end:
                result: torch.Tensor = end.value
                return result
            if isinstance(message, Sum):
                answer = yield from self._sum(message)
            else:
                answer = yield message

    def _sum(self, message: Sum) -> Exchange:
        (tensor,) = message.tensors
        flat = tensor.reshape(self._own, -1)
        piece = -(-flat.shape[1] // self._all)
        padded = torch.nn.functional.pad(flat, (0, piece * self._all - flat.shape[1]))
        (pieces,) = yield Swap(padded.view(self._own, self._all, piece))
        total = pieces[0].clone()
        for other in pieces[1:].unbind():
            total += other
        (whole,) = yield Gather(total)
        return whole.flatten()[:flat.shape[1]].view(tensor.shape[1:])

    def send(self, messages: Sequence[Message]) -> list[Answer]:
        """Start to send messages, and return what waits for each answer. All ranks send the same kinds and shapes."""
        answers: list[Answer] = [lambda: None] * len(messages)
        for kind, start in ((Gather, self._gather), (Swap, self._swap), (Sum, self._add)):
            chosen = [index for index, message in enumerate(messages) if isinstance(message, kind)]
            if chosen:
                together = start([messages[index].tensors for index in chosen])
                for index, answer in zip(chosen, together):
                    answers[index] = answer
        return answers

    def _gather(self, messages: list[tuple[torch.Tensor, ...]]) -> list[Answer]:
        packed = [_pack(tensors, 1) for tensors in messages]
        own = torch.cat(packed, dim=1)
        whole = own if self._group is None else own.new_empty(self._all, own.shape[1])
        work = None if self._group is None else self._traffic.all_gather(whole, own, self._group)
        return _answers(work, whole, messages, packed, 1)

    def _swap(self, messages: list[tuple[torch.Tensor, ...]]) -> list[Answer]:
        packed = [_pack(tensors, 2) for tensors in messages]
        own = torch.cat(packed, dim=2)  # [own slots, S, bytes], to [ranks, own slots, their slots, bytes]
        by_rank = own.view(self._own, self._ranks, self._own, -1).transpose(0, 1).contiguous()
        received = by_rank if self._group is None else torch.empty_like(by_rank)
        work = None if self._group is None else self._traffic.all_to_all(received, by_rank, self._group)
        return _answers(work, received.view(self._all, self._own, -1), messages, packed, 2)

    def _add(self, messages: list[tuple[torch.Tensor, ...]]) -> list[Answer]:
        """Sum over ranks of one slot each."""
        flat = torch.cat([tensor.flatten() for (tensor,) in messages])
        work = None if self._group is None else self._traffic.all_reduce(flat, self._group)
        pieces = flat.split([tensor.numel() for (tensor,) in messages])

        def answer(index: int) -> torch.Tensor:
            if work is not None:
                work.wait()
            return pieces[index].view(messages[index][0].shape[1:])

        return [lambda index=index: answer(index) for index in range(len(messages))]  # type: ignore[misc]


def _pack(tensors: Sequence[torch.Tensor], dims: int) -> torch.Tensor:
    """Return tensors of the same first `dims` dimensions as bytes, uint8 [..., b], b a multiple of `ALIGNED`."""
    parts = []
    for tensor in tensors:
        data = tensor.reshape(*tensor.shape[:dims], -1).contiguous().view(torch.uint8)
        parts.append(torch.nn.functional.pad(data, (0, -data.shape[-1] % ALIGNED)))
    return torch.cat(parts, dim=-1)


def _answers(work: Any, received: torch.Tensor, messages: Sequence[tuple[torch.Tensor, ...]],
             packed: Sequence[torch.Tensor], dims: int) -> list[Answer]:
    """Return what waits for the answers to messages that were packed side by side.

    Args:
        work: of the collective; None: nothing to wait for.
        received: bytes [slots, ..., sum of all b].
        messages: that were sent.
        packed: their bytes.
        dims: see `_pack`.
    """
    pieces = received.split([data.shape[-1] for data in packed], dim=-1)

    def answer(index: int) -> tuple[torch.Tensor, ...]:
        if work is not None:
            work.wait()
        data, start, tensors = pieces[index], 0, []
        for tensor in messages[index]:
            shape = tensor.shape[dims:]
            length = shape.numel() * tensor.element_size()
            part = data[..., start:start + length].contiguous()
            tensors.append(part.view(tensor.dtype).view(*data.shape[:dims], *shape))
            start += length + -length % ALIGNED
        return tuple(tensors)

    return [lambda index=index: answer(index) for index in range(len(messages))]  # type: ignore[misc]
