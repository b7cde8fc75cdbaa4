"""Inputs of blocks on disk and, by copies that are as late as they may be, in host memory: the same bits."""

from __future__ import annotations

import errno
import gc
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from tests.unit.train.memory.test_activations import CONFIG
from tidewheel.errors import StorageError
from tidewheel.models.decoder import Decoder, next_tokens
from tidewheel.models.initial_values import init_parameter
from tidewheel.train import memory
from tidewheel.train.compile import compile_blocks
from tidewheel.train.memory import MemoryConfig, input_stores, scratch_file
from tidewheel.train.memory.activations import move_inputs
from tidewheel.train.memory.input_stores import DiskStore, HostStore
from tidewheel.train.memory.inputs_config import BUFFERS, LEAVING
from tidewheel.train.memory.kept_inputs import Kept
from tidewheel.train.memory.side_stream import Arriving

LAYERS = 2 * BUFFERS
CPU = torch.device("cpu")


class LateEvent:
    """Of a stream whose copies are made when somebody waits for one of them.

    Args:
        stream: of the copy.
        count: copies made by the end of this one.
    """

    def __init__(self, stream: LateCopies, count: int) -> None:
        self._stream, self._count = stream, count

    def synchronize(self) -> None:
        self._stream.run(self._count)


class LateCopies:
    """A `SideStream` whose copies are all made as late as they may be."""

    def __init__(self, device: torch.device) -> None:
        self._queue: list[Callable[[], Any]] = []
        self._made = 0
        self._lock = Lock()
        self._leaving: list[tuple[weakref.ref[Kept], torch.Tensor, LateEvent]] = []

    def run(self, count: int) -> None:
        with self._lock:  # threads that write to disk wait for copies too
            while self._made < count:
                self._queue[self._made]()
                self._made += 1

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> LateEvent:
        self._queue.append(lambda: to.copy_(source))
        return LateEvent(self, len(self._queue))

    def away(self, kept: Kept, x: torch.Tensor, host: torch.Tensor) -> LateEvent:
        while len(self._leaving) >= LEAVING:
            self._leaving.pop(0)[2].synchronize()
        copied = self._copy(host, x)
        self._leaving.append((weakref.ref(kept), x, copied))
        return copied

    def here(self, kept: Kept) -> torch.Tensor | None:
        for held, _, copied in self._leaving:
            if held() is None:
                copied.synchronize()
        self._leaving = [item for item in self._leaving if item[0]() is not None]
        return next((x for held, x, _ in self._leaving if held() is kept), None)

    def back(self, kept: Kept, host: torch.Tensor) -> Arriving:
        x = torch.full(kept.shape, float("nan"), dtype=kept.dtype)
        return Arriving(x, self._copy(x, host))  # type: ignore[arg-type]

    def arrived(self, arriving: Arriving) -> torch.Tensor:
        arriving.copied.synchronize()
        return arriving.x


def slow_write(handle: int, place: int, data: memoryview, where: Path) -> None:
    """Write late, so that what uses memory or space too early spoils it."""
    time.sleep(random.choice([0, 0.001, 0.004]))
    written(handle, place, data, where)


written = scratch_file._write


@pytest.fixture(params=["disk", "slow disk", "disk of a GPU", "host of a GPU"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskStore | HostStore:
    if request.param == "slow disk":
        monkeypatch.setattr(scratch_file, "_write", slow_write)
    if "GPU" not in request.param:
        return DiskStore(tmp_path, CPU)
    monkeypatch.setattr(input_stores, "SideStream", LateCopies)
    monkeypatch.setattr(input_stores, "buffer", lambda size, pinned: scratch_file.buffer(size))
    return DiskStore(tmp_path, torch.device("cuda")) if "disk" in request.param else HostStore(torch.device("cuda"))


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Space must be freed by the graph's end, not by a collection of garbage at some time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def decoder(kind: str = "none") -> Decoder:
    config = CONFIG.model_copy(update={"num_layers": LAYERS})
    model = Decoder(config, 64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, config, 0))
    memory.apply(model, MemoryConfig.model_validate({"activation_checkpointing": kind}))
    return model


def batch(length: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(seed))
    segments = (torch.arange(length) // 24).expand(2, length)
    return tokens, (torch.arange(length) % 24).expand(2, length), segments, next_tokens(tokens, segments)


def must_be_equal(one: Decoder, other: Decoder) -> None:
    for (name, parameter), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected.grad), name


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_bits_are_the_same(store: DiskStore | HostStore, precision: torch.dtype):
    """Steps of growing length: the file is divided anew for longer rows."""
    plain, moved = decoder(), decoder("offload")
    move_inputs(moved, store)
    for length in (24, 48, 40):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            losses = [model(*batch(length)) for model in (plain, moved)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    must_be_equal(moved, plain)
    of_longest = LAYERS * scratch_file.rounded(2 * 48 * CONFIG.dim * 4)
    if isinstance(store, DiskStore):
        assert store.file is not None
        assert store.file.size == of_longest, "each row's space is used again"
        assert os.listdir(store._folder) == [], "the file has no name"
    else:
        assert sum(len(held.memory) for held in store._free) == of_longest


def test_an_evaluation_moves_nothing(store: DiskStore | HostStore):
    plain, moved = decoder(), decoder("offload")
    move_inputs(moved, store)
    store.put = None  # type: ignore[assignment, method-assign]
    with torch.no_grad():
        assert torch.equal(moved(*batch(24)), plain(*batch(24)))


@pytest.mark.usefixtures("no_collection")
def test_several_micro_batches_at_once(store: DiskStore | HostStore):
    """As in a pipeline: forward passes of other micro-batches come before a backward pass, of other lengths too."""
    plain, moved = decoder(), decoder("offload")
    move_inputs(moved, store)
    for model in (plain, moved):
        waiting = [model(*batch(24, 0)), model(*batch(56, 1))]
        waiting.pop(0).backward()
        waiting.append(model(*batch(40, 2)))
        waiting.pop(0).backward()
        waiting.pop(0).backward()
    must_be_equal(moved, plain)


def test_a_graph_may_be_used_twice(store: DiskStore | HostStore):
    """As by schedules that compute the gradients of weights later."""
    plain, moved = decoder(), decoder("offload")
    move_inputs(moved, store)
    for model in (plain, moved):
        loss = model(*batch(24))
        loss.backward(retain_graph=True)
        loss.backward()
    must_be_equal(moved, plain)


def test_a_forward_pass_without_a_backward_pass_frees_its_space(tmp_path: Path):
    moved, store = decoder("offload"), DiskStore(tmp_path, CPU)
    move_inputs(moved, store)
    for _ in range(3):
        moved(*batch(24))
        gc.collect()
    assert store.file is not None
    assert store.file.size == LAYERS * scratch_file.rounded(2 * 24 * CONFIG.dim * 4)


@pytest.mark.long
def test_compiled_blocks_move_their_inputs(tmp_path: Path):
    torch._dynamo.reset()
    compilations = CompileCounterWithBackend("aot_eager_decomp_partition")
    plain, moved, store = decoder("full"), decoder("offload"), DiskStore(tmp_path, CPU)
    for model in (plain, moved):
        compile_blocks(model.blocks, backend=compilations)
    move_inputs(moved, store)
    for model in (plain, moved):
        model(*batch(24)).backward()
    must_be_equal(moved, plain)
    assert compilations.frame_count == 1, "all blocks share it, with and without a store"
    assert store.file is not None
    assert store.file.size == LAYERS * scratch_file.rounded(2 * 24 * CONFIG.dim * 4)


OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "put", "take", "fetch", "drop"]), st.integers(0, 11),
                                st.sampled_from([1, 7, 1024, 3000])), max_size=40)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(operations=OPERATIONS)
def test_a_store_returns_what_was_put_into_it(store: DiskStore | HostStore, operations: list[tuple[str, int, int]]):
    """In any order of storing, reading ahead, reading and forgetting."""
    held: dict[int, tuple[Kept, torch.Tensor]] = {}
    for number, (what, index, size) in enumerate(operations):
        if what == "put":
            x = torch.full((size,), float(number))
            kept = Kept(x, index, None)
            store.put(kept, x.clone())
            held[index] = kept, x
        elif index in held and what == "take":
            assert torch.equal(store.take(held[index][0]), held[index][1])
        elif index in held and what == "fetch":
            store.fetch(held[index][0])
        elif what == "drop":
            held.pop(index, None)
    left = list(held.values())
    random.Random(len(operations)).shuffle(left)
    for kept, x in left:
        assert torch.equal(store.take(kept), x)


def test_space_has_one_write_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Space of a forgotten input whose write goes on, while the buffer for the next input is free already."""
    under_way, twice = set(), []

    def checked(handle: int, place: int, data: memoryview, where: Path) -> None:
        if place in under_way:
            twice.append(place)
        under_way.add(place)
        time.sleep(0.2 if len(data) > scratch_file.ALIGNMENT else 0)
        written(handle, place, data, where)
        under_way.discard(place)

    monkeypatch.setattr(scratch_file, "_write", checked)
    store = DiskStore(tmp_path, CPU)
    small, large = torch.zeros(1), torch.zeros(3000)
    first, second = Kept(small, 0, None), Kept(large, 1, None)
    store.put(first, small)
    store.put(second, large)
    del first, second
    third = Kept(large, 0, None)
    store.put(third, large + 1)  # into the buffer of the first, and the space of the second
    assert torch.equal(store.take(third), large + 1)
    assert store.file is not None
    store.file.close()
    assert not twice
    assert store.file.size == 4 * scratch_file.ALIGNMENT


def test_a_full_disk_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At the fourth block, when the file has grown three times."""
    original, calls = os.posix_fallocate, []

    def full(handle: int, start: int, size: int) -> None:
        calls.append(start)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(handle, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = decoder("offload")
    memory.offload_inputs(model, MemoryConfig(activation_checkpointing="offload", activation_disk=str(tmp_path)), CPU)
    with pytest.raises(StorageError, match=r"needs 0\.00 GB on disk, 0\.00 of them allocated, .* are free\n.*"
                                           r"memory\.activation_disk"):
        model(*batch(24))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails_later_ends_the_step(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, store = decoder("offload"), DiskStore(tmp_path, CPU)
    move_inputs(model, store)
    model(*batch(24)).backward()

    def fails(handle: int, buffers: Any, place: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(StorageError, match="Input/output error"):
        model(*batch(24)).backward()


def test_a_cpu_keeps_inputs_where_they_are():
    model, plain = decoder("offload"), decoder("full")
    memory.offload_inputs(model, MemoryConfig(activation_checkpointing="offload"), CPU)
    for (_, block), (_, other) in zip(model.layers(), plain.layers(), strict=True):
        assert block.forward.func is other.forward.func  # type: ignore[attr-defined]


@pytest.mark.parametrize(("values", "says"), [
    ({"activation_disk": "/disk"}, "activation_disk is for activation_checkpointing: offload, here it is none"),
    ({"activation_checkpointing": "full", "activation_disk": "/disk"}, "here it is full"),
    ({"activation_checkpointing": "offload", "activation_disk": "disk"}, "nearest legal choice: /disk")])
def test_settings_that_are_refused(values: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        MemoryConfig.model_validate(values)
