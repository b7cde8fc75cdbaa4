"""Optimizer state on disk: the same bits as in memory, for every optimizer, through saves and restores."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.train.optim.test_optimizers import SHAPES, Weights
from tidewheel.checkpoint.staging import Snapshot, Stage, flatten
from tidewheel.errors import StorageError
from tidewheel.train import optimizers
from tidewheel.train.memory import scratch_file
from tidewheel.train.optim import disk_state, model_optimizer
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.optim.disk_state import DiskState

KINDS = optimizers.KIND.built_in()


def on_disk(weights: Weights, kind: str, folder: Path, **settings: Any):
    optimizer = build_optimizer(weights, optimizers.KIND.build(kind, settings))
    optimizer.move_to_disk(folder)
    return optimizer


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a parameter or two, so that there are more than buffers."""
    def small(*arguments: Any, **settings: Any) -> DiskState:
        return DiskState(*arguments, **{"piece_bytes": 4096, **settings})

    monkeypatch.setattr(model_optimizer, "DiskState", small)
    monkeypatch.setattr("tidewheel.train.optim.master.DiskState", small)


def state_of(weights: Weights, optimizer) -> dict[str, torch.Tensor]:
    tensors = training_state(weights, optimizer)
    return {f"{group}/{name}": tensor.clone() for group, held in tensors.items() for name, tensor in held.items()}


def must_be_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_in_memory(kind: str, low: bool, tmp_path: Path):
    """Saved, restored into another file and gone on with; with fp32 parameters, and with master weights on disk."""
    dtype = torch.bfloat16 if low else torch.float32
    weights, other, third = (lowered(Weights(), dtype) for _ in range(3))
    plain = build_optimizer(weights, optimizers.KIND.build(kind, {}))
    kept = on_disk(other, kind, tmp_path)
    assert kept.disk is not None
    assert kept.disk.bytes >= sum(tensor.nbytes for name, tensor in kept.tensors().items() if name != "step")
    for optimizer, held in ((plain, weights), (kept, other)):
        optimizer.started()
        held.take(optimizer, range(3))
    must_be_equal(state_of(weights, plain), state_of(other, kept))
    again = on_disk(third, kind, tmp_path)
    again.disk.read_ahead()
    saved = state_of(other, kept)
    for group, held in training_state(third, again).items():
        for name, tensor in held.items():
            tensor.copy_(saved[f"{group}/{name}"])
    again.restored()
    for optimizer, held in ((plain, weights), (again, third)):
        held.take(optimizer, range(3, 5))
    must_be_equal(state_of(weights, plain), state_of(third, again))
    assert os.listdir(tmp_path) == [], "the files have no names"


def lowered(weights: Weights, dtype: torch.dtype) -> Weights:
    for parameter in weights.held.values():
        parameter.data = parameter.data.to(dtype)
        parameter.grad_dtype = torch.float32  # as `accumulate_in_fp32`
    return weights


@pytest.mark.usefixtures("small_pieces")
def test_pieces_are_read_and_written_around_each_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights = Weights()
    optimizer = on_disk(weights, "adamw", tmp_path)
    order: list[tuple[str, int]] = []
    for name in ("read", "write"):
        original = getattr(scratch_file.ScratchFile, name)

        def traced(self: Any, place: int, memory: torch.Tensor, name: str = name, original: Any = original) -> Any:
            order.append((name, place))
            return original(self, place, memory)

        monkeypatch.setattr(scratch_file.ScratchFile, name, traced)
    for _ in range(2):
        weights.take(optimizer, range(1))
    pieces = sorted({place for _, place in order})
    assert len(pieces) > 3, "the state is larger than the memory for it"
    step = order[len(order) // 2:]
    assert step.index(("read", pieces[2])) < step.index(("write", pieces[1])), "the next is read before one is written"
    assert order[-1] == ("read", 0), "the first is read ahead for the next step"
    count = len(pieces)
    assert [name for name, _ in order].count("read") == 2 * count + 1
    assert [name for name, _ in order].count("write") == 2 * count


def test_a_save_copies_state_on_disk_there(tmp_path: Path):
    """So a checkpoint takes no host memory for it; parameters are copied to host memory as ever."""
    weights = Weights()
    optimizer = on_disk(weights, "adamw", tmp_path)
    weights.take(optimizer, range(1))
    parts, stage = flatten(training_state(weights, optimizer)), Stage()
    for _ in range(2):
        copies = stage.copy(parts, Snapshot.of(parts.values()))
        for name, copy in copies.items():
            assert torch.equal(copy, parts[name]), name
            kept_there = name.endswith((".exp_avg", ".exp_avg_sq"))
            assert (scratch_file.folder_of(copy) == tmp_path) == kept_there, name
            assert not copy.numel() or copy.data_ptr() != parts[name].data_ptr()
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("small_pieces")
def test_a_withheld_update_leaves_the_state(tmp_path: Path):
    weights = Weights()
    optimizer = on_disk(weights, "adamw", tmp_path)
    weights.take(optimizer, range(2))
    before = state_of(weights, optimizer)
    for name, gradient in weights.gradients(3).items():
        weights.held[name].grad = gradient
    optimizer.step(skip=torch.ones(()))
    must_be_equal(before, state_of(weights, optimizer))


def test_a_full_disk_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"needs 0\.00 GB on disk, .* are free\n.*memory\.optimizer_disk"):
        on_disk(Weights(), "adamw", tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("small_pieces")
def test_a_disk_that_fails_later_ends_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights = Weights()
    optimizer = on_disk(weights, "adamw", tmp_path)
    weights.take(optimizer, range(1))

    def full(handle: int, buffers: Any, place: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match="cannot write: No space left on device"):
        weights.take(optimizer, range(1, 2))


def test_an_optimizer_without_state_needs_no_file(tmp_path: Path):
    weights, plain = Weights(), Weights()
    optimizer = on_disk(weights, "sgd", tmp_path, momentum=0.0)
    assert optimizer.disk is not None
    assert optimizer.disk.bytes == 0
    weights.take(optimizer, range(2))
    plain.take(build_optimizer(plain, optimizers.KIND.build("sgd", {"momentum": 0.0})), range(2))
    for name in SHAPES:
        assert torch.equal(weights.held[name], plain.held[name])


def test_ranks_cut_alike():
    """A rank with a row more than another has the same parameters in each piece."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from tests.benchmarks.memory_table import fake_ranks
    from tidewheel.train.optim.base import allocate

    with fake_ranks(3):
        mesh = init_device_mesh("cpu", (3,))
        cuts = []
        for rows in (4, 3):  # of 10 rows, on the first and the last rank
            parts = [DTensor.from_local(torch.zeros(rows, 64), mesh, [Shard(0)], run_check=False, shape=(10, 64),
                                        stride=(64, 1)) for _ in range(6)]
            parameters = [torch.nn.Parameter(part) for part in parts]
            part = allocate(torch.optim.AdamW(parameters, foreach=True), ("step", "exp_avg", "exp_avg_sq"))
            cuts.append([len(piece.parameters) for piece in disk_state._cut(part, False, 4096)])
    assert cuts[0] == cuts[1] == [2, 2, 2]
