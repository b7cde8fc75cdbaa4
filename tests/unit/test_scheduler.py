"""`make test` hands out whole files, the data pipelines' files together."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import LONGEST_FIRST
from tests.scheduler import ONE_WORKER, FilesAndFolders

TESTS = Path(__file__).parents[1]


def test_files_that_share_a_cluster_go_to_one_worker():
    scope = FilesAndFolders._split_scope
    scheduler = object.__new__(FilesAndFolders)
    names = ("tests/cluster/data/test_a.py::test", "tests/cluster/data/test_b.py::test[1]")
    assert {scope(scheduler, name) for name in names} == {"tests/cluster/data/"}
    assert scope(scheduler, "tests/cluster/test_docs.py::test[a::b]") == "tests/cluster/test_docs.py"


def test_the_named_files_and_folders_are_there():
    assert [name for name in LONGEST_FIRST if not (TESTS / name).is_file()] == []
    assert [name for name in ONE_WORKER if not (TESTS.parent / name).is_dir()] == []
