"""A hanging save is given up in time on all ranks, and the next save works."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import on_ranks
from tests.unit.checkpoint.helpers import Events, HangingStore, manager, state
from tidewheel import storage
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.cluster.faults import frozen
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import StorageError
from tidewheel.storage import store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HANG_SECONDS = 60.0
"""Longer than any call that does not hang takes, even on a busy machine."""


@pytest.mark.parametrize("part", [".safetensors", "manifest.json"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_folder_that_hangs_costs_a_save_and_no_more(part: str, asynchronous: bool, tmp_path: Path):
    target = HangingStore(tmp_path, part)
    events = Events()
    saver = manager(target, events, save_seconds=1.0, asynchronous=asynchronous)
    saver.save(1, state(1), {})
    saver.wait()
    assert saver.saves().failed == 1
    [failed] = events.of("save_failed")
    assert failed["reason"].endswith("the save of step 1 took longer than 1 s")
    target.part = "nothing"
    patient = manager(target, events)
    patient.save(2, state(2), {})
    patient.wait()
    assert [detail["step"] for detail in events.of("commit")] == [2]
    target.released.set()
    assert list_checkpoints(target)[-1].step == 2


def test_the_limit_of_failed_saves_counts_those_that_hang(tmp_path: Path):
    saver = manager(HangingStore(tmp_path), save_seconds=0.2, max_failed=2)
    saver.save(1, state(1), {})
    saver.save(2, state(2), {})
    with pytest.raises(StorageError, match=r"2 saves in a row have failed; the last one: .*took longer than"):
        saver.wait()


def test_training_is_not_held_up_by_a_silent_store():
    """The kernel still accepts connections for a stopped server, and no request is answered."""
    with S3Server() as server:
        target = storage.store(server.create_bucket("silent") + "/checkpoints")
        events = Events()
        healthy = manager(target, events)
        healthy.save(1, state(1), {})
        healthy.wait()
        assert server.pid is not None
        saver = manager(target, events, save_seconds=4.0)
        with frozen(server.pid):
            for step in (2, 3):  # the second waits for the first
                saver.save(step, state(step), {})
                saver.settle()
            saver.wait()
        assert [detail["step"] for detail in events.of("save_failed")] == [2, 3]
        assert "took longer than 4 s" in events.of("save_failed")[0]["reason"]
        healthy.save(4, state(4), {})
        healthy.wait()
        assert [detail["step"] for detail in events.of("commit")] == [1, 4]


def test_a_save_is_broken_off_when_its_worker_group_ends(tmp_path: Path):
    target = HangingStore(tmp_path)
    events = Events()
    saver = manager(target, events)
    saver.save(1, state(1), {})
    assert target.entered.wait(HANG_SECONDS)
    saver.break_off()
    saver.wait()
    [failed] = events.of("save_failed")
    assert "was stopped: its workers have parted" in failed["reason"]
    saver.save(2, state(2), {})  # a later save is broken off at once
    saver.wait()
    assert saver.saves().failed == 2
    target.released.set()
    assert not any(info.complete for info in list_checkpoints(target))


def test_a_clean_up_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tidewheel.checkpoint import manager as module

    released = threading.Event()
    events = Events()
    monkeypatch.setattr(module, "collect", lambda *arguments, **named: released.wait())
    saver = manager(store(tmp_path), events, save_seconds=5.0)  # the save itself ends in time
    saver.save(1, state(1), {})
    saver.wait()
    released.set()
    assert [kind for kind, _ in events] == ["commit", "cleanup_failed"]


def hang_on_one_rank(root: Path) -> None:
    """Let rank 1's folder hang in the first save: no rank commits it, and all take part in the second."""
    mesh = init_device_mesh("cpu", (2,))
    target = HangingStore(root, "step_00000001" if dist.get_rank() == 1 else "nothing")
    events = Events()
    saver = manager(target, events, save_seconds=15.0)  # the second save ends in time, even on a busy machine
    for step in (1, 2):
        saver.save(step, state(step, mesh), {"step": step})
        saver.wait()
    if dist.get_rank() == 0:
        assert [kind for kind, _ in events] == ["save_failed", "commit"]
        assert events[0][1]["reason"].startswith("rank 1: ")
    dist.barrier()
    target.released.set()


def test_a_folder_that_hangs_for_one_rank_costs_one_save(tmp_path: Path):
    on_ranks(2, hang_on_one_rank, tmp_path)
    assert [info.step for info in list_checkpoints(store(tmp_path)) if info.complete] == [2]
