"""Shards that turn bad before and while they are read: read again, then named, never passed over."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.unit.shards.helpers import write_set
from tests.unit.shards.test_shard_set import FarStore
from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.shards.integrity import check_files
from tidewheel.shards.loader import Loader
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.source import Source, SourceReader

EVERYTHING = (np.repeat(np.arange(3), [5, 9, 1]), np.concatenate([np.arange(5), np.arange(9), np.arange(1)]))


def flip(path: Path) -> None:
    """One bit of a file, in place, as a disk or a careless tool does it."""
    with path.open("r+b") as file:
        position = os.path.getsize(path) // 2
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def truncate(path: Path) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


def test_intact_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tidewheel.shards import integrity

    hashed: list[str] = []
    real = integrity.problem_of
    monkeypatch.setattr(integrity, "problem_of", lambda path, shard: (hashed.append(path.name), real(path, shard))[1])
    manifest = write_set(tmp_path)
    shard_set = ShardSet.open(str(tmp_path), verify=True)
    first = shard_set.rows(*EVERYTHING)
    shard_set.settle()
    assert np.array_equal(shard_set.rows(*EVERYTHING).tokens, first.tokens)
    shard_set.settle()
    assert sorted(hashed) == sorted(shard.name for shard in manifest.shards)
    shard_set.close()


@pytest.mark.parametrize("damage", [flip, truncate])
def test_a_shard_that_turns_bad_is_named(damage, tmp_path: Path):
    """Also a truncated one: without a look at the file a read of its map would end the process."""
    manifest = write_set(tmp_path)
    shard_set = ShardSet.open(str(tmp_path), verify=True)
    shard_set.rows(*EVERYTHING)
    shard_set.settle()
    damage(tmp_path / manifest.shards[1].name)
    assert len(shard_set.rows(np.array([0, 2]), np.array([0, 0])).ids) == 2
    with pytest.raises(ShardError) as caught:
        shard_set.rows(*EVERYTHING)
    assert manifest.shards[1].name in caught.value.where
    with pytest.raises(ShardError):  # and again: it does not get better by asking
        shard_set.rows(np.array([1]), np.array([0]))
    shard_set.close()


def test_what_was_bad_before_the_first_read_is_found_soon(tmp_path: Path):
    """A flipped bit that no structure shows: rows are handed out, but the hash stops the next read, or the save."""
    manifest = write_set(tmp_path)
    flip(tmp_path / manifest.shards[1].name)
    shard_set = ShardSet.open(str(tmp_path), verify=True)
    shard_set.rows(np.array([0]), np.array([0]))
    shard_set.settle()
    shard_set._load(1)
    with pytest.raises(ShardError, match="read twice") as caught:
        shard_set.settle()
    assert manifest.shards[1].name in caught.value.where
    shard_set.close()


def test_a_set_that_is_written_anew_reads_on(tmp_path: Path):
    reports: list[tuple[str, str]] = []
    manifest = write_set(tmp_path)
    shard_set = ShardSet.open(str(tmp_path), verify=True, on_damage=lambda where, what: reports.append((where, what)))
    before = shard_set.rows(*EVERYTHING)
    folder = tmp_path / manifest.shards[0].name
    content = folder.read_bytes()
    folder.unlink()
    folder.write_bytes(content)
    os.utime(folder, ns=(1, 1))
    assert np.array_equal(shard_set.rows(*EVERYTHING).tokens, before.tokens)
    assert len(reports) == 1
    assert "changed while it was read" in reports[0][1]
    shard_set.close()


def test_a_damaged_copy_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The copy goes bad while it is mapped; the origin is fine: the reader gets what was written, and tells."""
    far, cache, reports = tmp_path / "far", tmp_path / "cache", []
    manifest = write_set(far)
    monkeypatch.setattr(storage, "store", lambda uri: FarStore(uri))
    source = Source.single(str(far), manifest, 3)
    reader = SourceReader(source, cache, verify=True, on_damage=lambda where, what: reports.append((where, what)))
    loader = Loader(reader, prefetch=0)
    positions = np.arange(15)
    before = loader.batch(positions)
    for shard in manifest.shards:
        flip(cache / shard.name)
    after = loader.batch(positions)
    for name in ("tokens", "lengths", "segment_ids", "positions"):
        assert np.array_equal(getattr(after, name), getattr(before, name))
    assert reports
    loader.settle()
    flip(far / manifest.shards[0].name)
    flip(cache / manifest.shards[0].name)
    with pytest.raises(ShardError, match="not what its manifest says"):
        loader.batch(positions)
    loader.close()


def test_files_are_looked_at_before_the_start(tmp_path: Path):
    manifest = write_set(tmp_path)
    place, victim = storage.store(tmp_path), tmp_path / manifest.shards[2].name
    check_files(place, manifest)
    flip(victim)
    check_files(place, manifest, hash_bytes=10)  # too much to read: left to the first read
    with pytest.raises(ShardError, match="not what its manifest says") as caught:
        check_files(place, manifest)
    assert victim.name in caught.value.where
    truncate(victim)
    with pytest.raises(ShardError, match="its manifest says"):
        check_files(place, manifest, hash_bytes=10)
    victim.unlink()
    with pytest.raises(ShardError, match="missing"):
        check_files(place, manifest, hash_bytes=10)
