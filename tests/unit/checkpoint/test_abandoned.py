"""The leftovers of a writer that was killed in the middle of a checkpoint are removed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.checkpoint.helpers import Events, manager, state
from tidewheel import storage
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import StorageError
from tidewheel.storage import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(params=["local", "s3"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield storage.store(tmp_path)
        return
    with S3Server() as server:
        yield storage.store(server.create_bucket("killed") + "/runs/x/checkpoints")


def killed_while_it_writes(target: Store) -> None:
    with target.writer("step_00000010/rank_00000-abcdef01.safetensors") as sink:
        sink.write(bytes(40 << 20))
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_commit_removes_the_leftovers_of_a_killed_save(target: Store) -> None:
    child = multiprocessing.get_context("spawn").Process(target=killed_while_it_writes, args=(target,))
    child.start()
    child.join(60)
    assert len(target.uploads()) == 1
    events = Events()
    saver = manager(target, events)
    for step in (20, 30):  # the second save at the latest, since a store's clock may count in seconds
        saver.save(step, state(step), {})
        saver.wait()
    assert list(target.uploads()) == []
    assert [kind for kind, _ in events] == ["commit", "commit"]
    assert manager(target).load_latest(state(999)) == {}


def test_a_store_that_cannot_list_uploads_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(self: Store, prefix: str = "") -> None:
        asked.append(prefix)
        raise StorageError("access refused", where=self.uri, fix="allow it")

    monkeypatch.setattr(storage.LocalStore, "uploads", refuse)
    events = Events()
    saver = manager(storage.store(tmp_path), events)
    for step in (1, 2):
        saver.save(step, state(step), {})
        saver.wait()
    assert len(asked) == 1
    assert [kind for kind, _ in events] == ["commit", "cleanup_failed", "commit"]
