"""Tests of a fragment's sets of tensors in storage: which weights groups begin with, what is deleted, and damage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tidewheel import storage
from tidewheel.checkpoint.peers import Peers
from tidewheel.errors import CheckpointError, ConfigError, StorageError
from tidewheel.outer.files import Folder
from tidewheel.outer.fragment import Fragment
from tidewheel.storage import LocalStore, content_hash
from tidewheel.train.outer_config import OuterConfig


def at_once(request: Callable[[], Any]) -> Any:
    """Run a request without another try."""
    return request()


def fragment(folder: Path, group: int = 0, groups: int = 1, keep: int = 4) -> Fragment:
    """Return a fragment with one weight, which is the group's number plus one."""
    config = OuterConfig(groups=groups, group=group, store=str(folder), keep=keep)
    weight = torch.full((2, 2), 1.0 + group)
    return Fragment(storage.store(folder), [("weight", weight)], config, Peers(), at_once, {})


@pytest.fixture(params=[True, False], ids=["conditional creates", "creates that overwrite"])
def creates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let creates overwrite, as on some object stores."""
    def overwrite(store: LocalStore, key: str, data: bytes) -> bool:
        store.write(key, data)
        return True

    if not request.param:
        monkeypatch.setattr(LocalStore, "create", overwrite)


@pytest.mark.usefixtures("creates")
def test_the_weights_of_the_first_group_are_those_of_all(tmp_path: Path):
    """Both find no outer state, and the second is late."""
    groups = [fragment(tmp_path, number, groups=2) for number in range(2)]
    for group in groups:
        group.found()
        group.load(0)
    assert [group.base[0].unique().tolist() for group in groups] == [[1.0], [1.0]]
    assert len(list(tmp_path.glob("checkpoints/*/manifest.json"))) == 1, "those of the second are deleted"


def test_a_round_that_nobody_deleted_goes_with_the_next(tmp_path: Path):
    for number in range(1, 4):
        fragment(tmp_path, keep=4).commit(number)  # none is old enough to be deleted
    fragment(tmp_path, keep=2).commit(4)
    kept = [path.name for path in (tmp_path / "checkpoints").glob("step_*") if any(path.iterdir())]
    assert sorted(kept) == ["step_00000003", "step_00000004"]


def test_an_offer_whose_answer_was_lost_has_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The store has written the manifest, but the request that did so ends in an error and is made again."""
    store = storage.store(tmp_path)
    write = store.write
    lost: list[str] = []

    def lossy(key: str, data: bytes) -> storage.Stamp:
        stamp = write(key, data)
        if not lost:
            lost.append(key)
            raise StorageError("no answer", where=key, fix="try again")
        return stamp

    def twice(request: Callable[[], Any]) -> Any:
        try:
            return request()
        except StorageError:
            return request()

    monkeypatch.setattr(store, "write", lossy)
    folder = Folder(store, Peers(), twice)
    digest = folder.write("step_00000001", 1, {"values": torch.ones(3)}, {})
    assert lost == ["step_00000001/manifest.json"]
    assert digest == content_hash((tmp_path / "step_00000001/manifest.json").read_bytes())
    assert folder.written_bytes > 0


@pytest.mark.parametrize("missing", ["*", "*.safetensors"])
def test_a_set_that_others_have_deleted_is_a_checkpoint_error(tmp_path: Path, missing: str):
    """A group that goes on from an old round may find a part of it or nothing."""
    folder = Folder(storage.store(tmp_path), Peers(), at_once)
    folder.write("step_00000001", 1, {"values": torch.ones(3)}, {})
    for path in (tmp_path / "step_00000001").glob(missing):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"(?s)a file is missing.*fix: restore it from a copy"):
        folder.read("step_00000001", {"values": torch.empty(3)})


def test_a_damaged_set_says_what_groups_can_do(tmp_path: Path):
    folder = Folder(storage.store(tmp_path), Peers(), at_once)
    folder.write("step_00000001", 1, {"values": torch.ones(3)}, {})
    with pytest.raises(ConfigError, match=r"(?s)values is float32 \[3\].*give all groups the same model"):
        folder.read("step_00000001", {"values": torch.empty(4)})
    [file] = tmp_path.glob("*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"(?s)rank_00000.*bytes at 0.*fix: restore it from a copy"):
        folder.read("step_00000001", {"values": torch.empty(3)})
    (tmp_path / "step_00000001/manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"(?s)manifest\.json is damaged.*fix: restore it from a copy"):
        folder.read("step_00000001", {"values": torch.empty(3)})
