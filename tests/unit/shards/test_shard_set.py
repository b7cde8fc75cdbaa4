"""What is written is read: format, manifest, reader, loader, digest, verify."""

import dataclasses
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.shards.helpers import LENGTH, table, write_set
from tidewheel import storage
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import ShardError
from tidewheel.shards import cache as shard_cache
from tidewheel.shards.digest import sequence_digest
from tidewheel.shards.format import shard_schema, write_shard
from tidewheel.shards.loader import Loader
from tidewheel.shards.manifest import read_manifest
from tidewheel.shards.reader import ShardSet, _segments_of
from tidewheel.shards.source import Source, SourceReader
from tidewheel.shards.verify import inspect, verify


def test_equal_tables_give_equal_bytes(tmp_path: Path):
    whole = table(20)
    parts = pa.concat_tables([table(7), table(13, 7)])
    sliced = pa.concat_tables([table(3, 90), table(20), table(5, 50)]).combine_chunks().slice(3, 20)
    noted = whole.replace_schema_metadata({"made": "yesterday"})
    tables = [whole, parts, sliced, noted]
    infos = {write_shard(storage.store(tmp_path / str(i)), each) for i, each in enumerate(tables)}
    assert len(infos) == 1
    info = infos.pop()
    assert storage.content_hash((tmp_path / "2" / info.name).read_bytes()) == info.hash
    assert info.rows == 20
    assert info.tokens == sum(LENGTH - r % 4 for r in range(20))


def test_what_is_no_shard(tmp_path: Path):
    folder_store = storage.store(tmp_path)
    with pytest.raises(ValueError, match="at least one row"):
        write_shard(folder_store, table(0))
    with pytest.raises(ValueError, match="not a shard"):
        write_shard(folder_store, pa.table({"tokens": [1]}))
    nulls = table(2).set_column(1, "length", pa.array([1, None], pa.int32()))
    with pytest.raises(ValueError, match="'length'"):
        write_shard(folder_store, nulls)
    assert list(tmp_path.iterdir()) == []


def test_rows_are_what_was_written(tmp_path: Path):
    write_set(tmp_path, (5, 9, 1), loss_mask=True)
    shard_set = ShardSet.open(str(tmp_path))
    shards, rows = np.array([1, 0, 2, 1, 1]), np.array([8, 0, 0, 0, 8])
    result = shard_set.rows(shards, rows)
    assert result.tokens.dtype == np.uint16
    assert result.lengths.dtype == result.segment_ids.dtype == result.positions.dtype == np.int32
    for i, number in enumerate([13, 0, 14, 5, 13]):
        expected = table(1, number, loss_mask=True).to_pylist()[0]
        assert result.tokens[i].tolist() == expected["tokens"]
        assert result.lengths[i] == expected["length"]
        assert result.loss_mask[i].tolist() == expected["loss_mask"]
        segments, positions = [], []
        bounds = [*expected["segment_starts"], expected["length"]]
        for segment, (begin, end) in enumerate(itertools.pairwise(bounds)):
            segments += [segment] * (end - begin)
            positions += range(end - begin)
        padding = LENGTH - expected["length"]
        assert result.segment_ids[i].tolist() == segments + [-1] * padding
        assert result.positions[i].tolist() == positions + [0] * padding
    assert result.ids == [f"{shard_set.manifest.shards[s].name}:{r}" for s, r in zip(shards, rows)]
    with pytest.raises(IndexError):
        shard_set.rows(np.array([0]), np.array([5]))


def test_a_local_shard_is_mapped_not_copied(tmp_path: Path):
    write_set(tmp_path)
    before = pa.total_allocated_bytes()
    shard = ShardSet.open(str(tmp_path)).shard(1)
    assert not shard.tokens.flags.writeable
    assert not shard.tokens.flags.owndata
    assert pa.total_allocated_bytes() - before < 4096


def test_manifest_survives_and_its_hash_is_stable(tmp_path: Path):
    manifest = write_set(tmp_path)
    again = read_manifest(storage.store(tmp_path))
    assert again == manifest
    assert again.hash == manifest.hash
    assert (again.rows, again.tokens) == (15, sum(LENGTH - r % 4 for r in range(15)))
    assert again.utilisation == pytest.approx(again.tokens / (15 * LENGTH))
    assert dataclasses.replace(manifest, recipe_hash="other").hash != manifest.hash


@pytest.mark.parametrize(("path", "value"), [
    (("tokenizer", "file"), "../../etc/passwd"), (("tokenizer", "file"), "/etc/passwd"), (("tokenizer", "eos"), 128),
    (("shards", 0, "name"), "../evil.arrow"), (("shards", 0, "name"), "0" * 32 + ".arrow"),
    (("shards", 0, "rows"), -1), (("shards", 0, "rows"), 2.0), (("shards", 0, "rows"), True),
    (("shards", 0, "tokens"), 10**9), (("shards", 0, "hash"), "md5-1"), (("shards", 0), None), (("shards",), {}),
    (("token_dtype",), "object"), (("vocabulary_size",), 100), (("vocabulary_size",), 1 << 17),
    (("sequence_length",), 0), (("documents",), "3"), (("loss_mask",), 0), (("format",), 2), ((), []),
    (("evaluation_sets", 0, "items"), "x"), (("recipe_hash",), None), (("tokenizer", "hash"), ""),
], ids=str)
def test_every_field_of_a_manifest_is_checked(path: tuple, value: object, tmp_path: Path):
    write_set(tmp_path)
    file = tmp_path / "manifest.json"
    values = json.loads(file.read_text())
    if path:
        node = values
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = value
    else:
        values = value
    file.write_text(json.dumps(values))
    with pytest.raises(ShardError) as caught:
        read_manifest(storage.store(tmp_path))
    assert str(file) in str(caught.value)
    assert caught.value.fix
    if path:
        assert str(path[-1] if isinstance(path[-1], str) else path[-2]) in caught.value.what


def test_missing_fields_and_files(tmp_path: Path):
    with pytest.raises(ShardError, match="no shard set here"):
        ShardSet.open(str(tmp_path))
    write_set(tmp_path)
    file = tmp_path / "manifest.json"
    text = file.read_text()
    for key in json.loads(text):
        file.write_text(json.dumps({k: v for k, v in json.loads(text).items() if k != key}))
        with pytest.raises(ShardError, match=f"{key} is missing"):
            read_manifest(storage.store(tmp_path))
    file.write_text(text[: len(text) // 2])
    with pytest.raises(ShardError, match="JSON"):
        read_manifest(storage.store(tmp_path))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _scramble(path: Path) -> None:
    path.write_bytes(b"\xa5" * path.stat().st_size)


@pytest.mark.parametrize("damage", [_truncate, _scramble, Path.unlink])
def test_a_damaged_shard_is_named(damage, tmp_path: Path):
    manifest = write_set(tmp_path)
    damage(tmp_path / manifest.shards[1].name)
    shard_set = ShardSet.open(str(tmp_path))
    assert len(shard_set.rows(np.array([0]), np.array([0])).ids) == 1
    with pytest.raises(ShardError) as caught:
        shard_set.rows(np.array([0, 1]), np.array([0, 0]))
    assert manifest.shards[1].name in caught.value.where
    assert caught.value.fix
    problems = verify(str(tmp_path))
    assert len(problems) == 1
    assert manifest.shards[1].name in problems[0]


def test_another_schema_under_a_valid_manifest(tmp_path: Path):
    write_set(tmp_path, sequence_length=LENGTH + 1)
    with pytest.raises(ShardError, match="columns"):
        ShardSet.open(str(tmp_path)).rows(np.array([0]), np.array([0]))
    write_set(tmp_path / "mask", loss_mask=True)
    values = json.loads((tmp_path / "mask" / "manifest.json").read_text())
    (tmp_path / "mask" / "manifest.json").write_text(json.dumps({**values, "loss_mask": False}))
    assert any("columns" in problem for problem in verify(str(tmp_path / "mask")))


@pytest.mark.parametrize(("changes", "expected"), [
    ({"tokens": [200] * LENGTH}, "vocabulary"), ({"segment_starts": [1, 3]}, "segments"),
    ({"segment_starts": [0, 0]}, "segments"), ({"segment_starts": [0, LENGTH]}, "segments"),
    ({"document_ids": ["a"]}, "document_ids"), ({"document_offsets": [0, -1]}, "negative"),
    ({"length": 0}, "tokens"), ({"length": 9}, "pad token"),
    ({"segment_starts": [], "document_ids": [], "document_offsets": []}, "no segment"),
], ids=str)
def test_verify_reads_the_content(changes: dict, expected: str, tmp_path: Path):
    manifest = write_set(tmp_path, (3,))
    good = {"tokens": [5] * LENGTH, "length": LENGTH, "segment_starts": [0, 4], "document_ids": ["a", "b"],
            "document_offsets": [0, 0]}
    wrong = pa.Table.from_pylist([good, {**good, **changes}], schema=shard_schema(LENGTH, "uint16"))
    info = write_shard(storage.store(tmp_path), wrong)
    values = json.loads((tmp_path / "manifest.json").read_text())
    values["shards"] = [dataclasses.asdict(info)]
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    problems = verify(str(tmp_path))
    assert any(expected in problem for problem in problems), problems
    assert manifest.shards[0].name not in problems[0]


def test_an_intact_set(tmp_path: Path):
    manifest = write_set(tmp_path)
    assert verify(str(tmp_path)) == []
    seen = inspect(str(tmp_path))
    assert json.loads(json.dumps(seen)) == seen
    assert (seen["rows"], seen["tokens"], seen["hash"]) == (15, manifest.tokens, manifest.hash)
    row = inspect(str(tmp_path), row=14)
    assert row["id"] == f"{manifest.shards[2].name}:0"
    assert [segment["document"] for segment in row["segments"]] == ["d14-0", "d14-3", "d14-7"]
    assert sum(segment["tokens"] for segment in row["segments"]) == row["length"]
    with pytest.raises(ShardError, match="no row 15"):
        inspect(str(tmp_path), row=15)
    (tmp_path / "tokenizer.json").write_text("[]")
    assert verify(str(tmp_path)) == ["tokenizer.json: hash differs: the content has changed"]


def test_loader_gives_the_same_with_and_without_reading_ahead(tmp_path: Path):
    manifest = write_set(tmp_path)
    reader = SourceReader(Source.single(str(tmp_path), manifest, 3))
    plain, ahead = Loader(reader, prefetch=0), Loader(reader)
    batches = [np.arange(s, s + 4) for s in (0, 4, 8, 12, 16, 100, 4, 8, 2)]
    for positions in batches:
        a, b = plain.batch(positions), ahead.batch(positions)
        assert a.ids == b.ids
        assert np.array_equal(a.tokens, b.tokens)
    ahead.close()


@given(rows=st.lists(st.tuples(st.integers(1, 9), st.sets(st.integers(1, 8), max_size=4)), min_size=1, max_size=5))
def test_segments_spelled_out_one_by_one(rows: list[tuple[int, set[int]]]):
    """(segment ids, positions) against a loop over the row's tokens."""
    length = 9
    marks = np.zeros((len(rows), length), bool)
    ids, positions = np.full(marks.shape, -1), np.zeros(marks.shape, int)
    for row, (real, starts) in enumerate(rows):
        begins = sorted({0, *(start for start in starts if start < real)})
        marks[row, begins] = True
        for place in range(real):
            ids[row, place] = sum(begin <= place for begin in begins) - 1
            positions[row, place] = place - begins[ids[row, place]]
    result = _segments_of(marks, np.array([real for real, _ in rows]))
    np.testing.assert_array_equal(result[0], ids)
    np.testing.assert_array_equal(result[1], positions)
    assert result[0].dtype == result[1].dtype == np.int32


def test_positions_located_ahead_are_the_same(tmp_path: Path):
    """In any pattern: even strides, jumps back, other sizes."""
    write_set(tmp_path / "set")
    source = Source.single(str(tmp_path / "set"), read_manifest(storage.store(tmp_path / "set")), 3)
    reader, step = SourceReader(source), np.arange(4)
    starts = [*range(0, 4000, 16), 8, 24, 40, 56, 0, 0, 0, 5, 4, 3, 2, *range(100, 900, 4)]
    for start in starts:
        for positions in (start + step, start + step[:2]) if start % 32 == 8 else (start + step,):
            expected = source.ids(positions[0], len(positions))
            assert reader.read(positions).ids == expected


def test_digest_feels_order_and_borders():
    assert len(sequence_digest(["a:1", "b:2"])) == 32
    assert len({sequence_digest(ids) for ids in (["a", "b"], ["b", "a"], ["ab"], ["a"], [], ["a", "b", ""])}) == 6


class FarStore(storage.LocalStore):
    """A folder that cannot be memory-mapped, like an object store."""

    opened = 0

    def local_path(self, key: str) -> Path | None:
        return None

    def open(self, key: str):
        FarStore.opened += key.endswith(".arrow")
        return super().open(key)


def test_remote_shards_are_copied_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    far, cache = tmp_path / "far", tmp_path / "cache"
    manifest = write_set(far)
    monkeypatch.setattr(storage, "store", lambda uri: FarStore(uri))
    names = [shard.name for shard in manifest.shards]
    read = [np.array([0, 1, 2]), np.array([0, 0, 0])]
    FarStore.opened = 0
    first = ShardSet.open(str(far), cache).rows(*read)
    assert FarStore.opened == 3
    ShardSet.open(str(far), cache).rows(*read)
    assert FarStore.opened == 3  # taken from the cache
    assert sorted(path.name for path in cache.iterdir()) == sorted(names)

    _scramble(cache / names[0])  # a damaged copy is copied again
    assert np.array_equal(ShardSet.open(str(far), cache).rows(*read).tokens, first.tokens)
    assert FarStore.opened == 4

    size = max(shard.bytes for shard in manifest.shards)
    small = ShardSet.open(str(far), tmp_path / "small", cache_bytes=size)
    assert np.array_equal(small.rows(*read).tokens, first.tokens)
    assert sum(path.stat().st_size for path in (tmp_path / "small").iterdir()) <= size

    _scramble(far / names[1])
    with pytest.raises(ShardError, match="is not what its manifest says") as caught:
        ShardSet.open(str(far), tmp_path / "new").rows(*read)
    assert names[1] in caught.value.where
    assert not (tmp_path / "new" / names[1]).exists()
    assert not list((tmp_path / "new").glob(".tmp*"))


@pytest.mark.parametrize("links", [True, False])
def test_readers_that_share_a_cache_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links):
    """Workers of one node: each finds the others' copies, or copies at the same time."""
    far, cache, reports = tmp_path / "far", tmp_path / "cache", []
    manifest = write_set(far)
    monkeypatch.setattr(storage, "store", lambda uri: FarStore(uri))
    if not links:
        monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(OSError("no links here")))
    sets = [ShardSet.open(str(far), cache, verify=True, on_damage=lambda *what: reports.append(what)) for _ in range(3)]
    read = [np.array([0, 1, 2]), np.array([0, 0, 0])]
    sets[0].rows(*read)
    sets[1].rows(*read)  # finds them there
    with monkeypatch.context() as late:  # as if it had begun to copy before the first had done so
        answers = itertools.cycle([lambda *_: None, shard_cache._intact])
        late.setattr(shard_cache, "_intact", lambda *file: next(answers)(*file))
        sets[2].rows(*read)
    for one in sets:
        one.rows(*read)
        one.settle()
        one.close()
    assert reports == []
    assert sorted(path.name for path in cache.iterdir()) == sorted(shard.name for shard in manifest.shards)


def test_a_set_on_an_object_store(tmp_path: Path):
    """The S3 protocol for real: written, read through the cache, verified, and a damaged object named."""
    with S3Server() as server:
        server.create_bucket("bucket")
        uri = "s3://bucket/set"
        manifest = write_set(uri)
        local = write_set(tmp_path / "local")
        assert local.hash == manifest.hash
        rows = ShardSet.open(uri, tmp_path / "cache").rows(np.array([2, 0]), np.array([0, 4]))
        assert np.array_equal(rows.tokens, ShardSet.open(str(tmp_path / "local")).rows(
            np.array([2, 0]), np.array([0, 4])).tokens)
        assert verify(uri) == []
        storage.store(uri).write(manifest.shards[0].name, b"x")
        with pytest.raises(ShardError, match="is not what its manifest says"):
            ShardSet.open(uri, tmp_path / "other").rows(np.array([0]), np.array([0]))
        assert manifest.shards[0].name in verify(uri)[0]
