"""Tests of copies to the device: pinned, on a stream of their own, and waited for by the stream that computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tests.device_counters import DEVICE, Counters, device_that_counts
from tests.unit.train.test_step import micro, rows
from tidewheel.train.device_copies import DeviceCopies, Streams

FIELDS = ("tokens", "positions", "segment_ids", "targets")


class Recorded(Streams):
    """Streams that record what happens on them, and how many copies the host has not waited for."""

    def __init__(self, counters: Counters) -> None:
        self.counters, self.events = counters, []

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.events.append("copying")
        yield
        self.events.append("computing")

    def copied(self) -> str:
        self.events.append("copied")
        return f"event {len(self.events)}"

    def wait(self, event: str) -> None:
        self.events.append(f"wait for {event}")

    def used(self, tensor: torch.Tensor) -> None:
        assert tensor.device == DEVICE
        self.events.append("used")


def test_copies_run_beside_the_step_and_the_host_does_not_wait():
    batches = [micro(rows(4), begin, begin + 2, begin) for begin in (0, 2)]
    with device_that_counts() as counters:
        streams = Recorded(counters)
        copies = DeviceCopies(DEVICE, streams)
        with counters:
            on_device, event = copies.start(batches)
            assert streams.events == ["copying", "copied", "computing"], "the event is behind the copies"
            taken = copies.take(on_device, event)
    assert counters.syncs == []
    assert streams.events[3:] == ["wait for event 2", *["used"] * (2 * len(FIELDS))]
    for before, after in zip(batches, taken):
        assert all(getattr(after, name).device == DEVICE for name in FIELDS)
        assert all(getattr(after, name).shape == getattr(before, name).shape for name in FIELDS)
        assert (after.virtual_rank, after.num_tokens) == (before.virtual_rank, before.num_tokens)


def test_an_ordinary_copy_makes_the_host_wait():
    """The counters notice a copy from memory that is not pinned, also if it asks not to wait."""
    with device_that_counts() as counters, counters:
        torch.zeros(2).to(DEVICE, non_blocking=True)
        torch.zeros(2).pin_memory().to(DEVICE)
        assert len(counters.syncs) == 2
        torch.zeros(2).pin_memory().to(DEVICE, non_blocking=True)
        assert len(counters.syncs) == 2


@dataclass(frozen=True)
class Nested:
    """A part of a batch."""

    offsets: torch.Tensor
    longest: int


@dataclass(frozen=True)
class Batch:
    """A batch with a part of its own."""

    tokens: torch.Tensor
    documents: Nested | None


def test_on_cpu_a_batch_is_not_copied_and_nested_tensors_are_moved():
    batch = Batch(torch.ones(2), Nested(torch.ones(3), 2))
    [same] = DeviceCopies(torch.device("cpu")).take(*DeviceCopies(torch.device("cpu")).start([batch]))
    assert same.tokens is batch.tokens
    [moved] = DeviceCopies(DEVICE).start([batch, Batch(torch.ones(2), None)])[0][:1]
    assert moved.tokens.device == moved.documents.offsets.device == DEVICE
    assert moved.documents.longest == 2
