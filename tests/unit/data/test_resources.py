"""Files of a recipe are found, keyed by their content, and checked when they are read."""

from __future__ import annotations

import pytest

from tidewheel.data import resources
from tidewheel.data.filters.urls import UrlFilter
from tidewheel.data.filters.words import WordFilter
from tidewheel.data.stages.filters import bound, identity, received
from tidewheel.errors import InputError, StorageError


def test_keys_depend_on_content_and_not_on_location(tmp_path):
    identities = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "list.txt").write_text("bad\n")
        settings = WordFilter(files=("list.txt",))
        references = resources.find(settings.paths(), str(tmp_path / folder))
        identities.append(identity(settings, references))
        arrived = received(*bound(settings, references))
        assert isinstance(arrived, WordFilter)
        assert arrived.files[0].endswith(f"@{tmp_path}/{folder}/list.txt")
        assert resources.lines(arrived.files) == ["bad"]
    assert identities[0] == identities[1]
    assert identities[0][1]["files"][0].startswith("blake3-")
    plain = UrlFilter(domains=("a.com",))
    assert received(*bound(plain, {})) == plain
    assert identity(plain, {}) == ["urls", plain.settings()] == ["urls", {"domains": ["a.com"]}]


def test_a_changed_file_raises(tmp_path):
    (tmp_path / "list.txt").write_text("bad\n")
    (reference,) = resources.find(["list.txt"], str(tmp_path)).values()
    with resources.local_path(reference) as path:
        assert path.read_text() == "bad\n"
    (tmp_path / "list.txt").write_text("worse\n")
    with pytest.raises(StorageError, match="has changed since the run began"):
        resources.read(reference)
    with pytest.raises(StorageError, match="has changed since the run began"):
        with resources.local_path(reference):
            pass


def test_missing_files_raise(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        resources.find(["list.txt"], str(tmp_path))
    with pytest.raises(InputError, match="no such file"):
        resources.read(str(tmp_path / "list.txt"))
    with pytest.raises(InputError, match="not installed"):
        resources.find(["package:no_such_package_here/file"], str(tmp_path))


def test_files_of_a_package_are_read():
    (reference,) = resources.find(["package:tidewheel/cli.py"], ".").values()
    assert b"def main" in resources.read(reference)
