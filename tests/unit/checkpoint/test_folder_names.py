"""Tests of the folder that a checkpoint goes to: writers never share one, and names say who wrote."""

from __future__ import annotations

import pytest

from tidewheel.checkpoint import commit
from tidewheel.checkpoint.commit import attempt_name, folder_name, publish, writer_of
from tidewheel.checkpoint.manifest import KEY, CheckpointManifest
from tidewheel.checkpoint.tensor_entry import RankFile
from tidewheel.commit_log import CommitLog
from tidewheel.errors import CheckpointError, OwnershipError
from tidewheel.lease import Holder
from tidewheel.storage import LocalStore


@pytest.fixture
def place(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "checkpoints")


def write(place: LocalStore, folder: str, generation: int | None) -> str:
    key = f"{folder}/rank0-{attempt_name(generation)}.safetensors"
    place.write(key, b"tensors")
    return key


@pytest.mark.parametrize("generation", [0, 7, 3_000_012])
def test_a_files_name_says_which_worker_group_wrote_it(place: LocalStore, generation: int):
    assert writer_of(write(place, "step_00000002", generation)) == generation
    assert attempt_name(generation) != attempt_name(generation)
    assert writer_of(write(place, "step_00000002", None)) is None


def test_a_group_uses_a_folder_again_and_no_other_groups(place: LocalStore):
    assert folder_name(place, 2, 4) == "step_00000002"
    write(place, "step_00000002", 4)
    assert folder_name(place, 2, 4) == "step_00000002", "its own files of a failed save"
    assert folder_name(place, 2, 5) == "step_00000002-g5"
    place.write(f"step_00000002-g5/{KEY}", b"{}")
    assert folder_name(place, 2, 5).startswith("step_00000002-g5."), "a checkpoint is there"
    assert folder_name(place, 2, None) == "step_00000002"


def test_without_conditional_creates_no_two_groups_share_a_name(place: LocalStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commit, "creates_are_conditional", lambda store: False)
    assert folder_name(place, 2, 0) == "step_00000002", "nobody was before the first group"
    assert folder_name(place, 2, 4) == "step_00000002-g4"


def manifest(generation: int, *files: str) -> CheckpointManifest:
    return CheckpointManifest(step=2, generation=generation, world_size=1, time=0.0, tensors={}, extra={},
                              files=tuple(RankFile(name, 1, "blake3-" + "0" * 64, rank)
                                          for rank, name in enumerate(files)))


def test_a_manifest_may_be_published_twice_and_not_replaced(place: LocalStore):
    CommitLog(place).take_over(Holder.me(), None)
    generation = CommitLog(place).head().epoch * 1_000_000
    for _ in range(2):  # the answer to the first request was lost
        publish(place, "step_00000002", manifest(generation, "a.safetensors"), owned=True)
    with pytest.raises(CheckpointError, match="has written its manifest here meanwhile"):
        publish(place, "step_00000002", manifest(generation, "b.safetensors"), owned=True)


def test_a_checkpoint_outside_a_run_is_refused_beside_one(place: LocalStore):
    publish(place, "step_00000002", manifest(0, "a.safetensors"), owned=False)
    assert place.exists(f"step_00000002/{KEY}")
    CommitLog(place).take_over(Holder.me(), None)
    with pytest.raises(OwnershipError, match="would be ignored"):
        publish(place, "step_00000004", manifest(0, "a.safetensors"), owned=False)
