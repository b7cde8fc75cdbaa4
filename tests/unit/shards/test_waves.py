"""A set in waves: each part of the order stands before the waves behind it are there; records are checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.shards.helpers import write_set
from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.shards import growing
from tidewheel.shards.growing import Growing, wave_key
from tidewheel.shards.manifest import Manifest, read_manifest
from tidewheel.shards.order import Order
from tidewheel.shards.source import Source, SourceReader, open_source
from tidewheel.shards.verify import inspect, verify
from tidewheel.shards.waves import Passes, WaveOrder

WAVES = st.lists(st.lists(st.integers(1, 40), max_size=4), min_size=1, max_size=6).filter(any)
ROWS, SIZES = (5, 9, 1, 4, 3), (2, 1, 0, 2)


@given(WAVES, st.integers(-(1 << 70), 1 << 70), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2))
@settings(deadline=None)
def test_each_row_once_in_each_epoch_wave_by_wave(waves: list[list[int]], seed: int, block: int, window: int,
                                                  epoch: int):
    rows = [count for wave in waves for count in wave]
    order = WaveOrder(rows, [len(wave) for wave in waves], seed, block_rows=block, window_blocks=window)
    total = sum(rows)
    shards, places = order.locate(np.arange(epoch * total, (epoch + 1) * total))
    assert sorted(zip(shards.tolist(), places.tolist())) == [(s, r) for s, n in enumerate(rows) for r in range(n)]
    wave_of = np.repeat(np.arange(len(waves)), [len(wave) for wave in waves])
    assert np.all(np.diff(wave_of[shards]) >= 0)


@given(WAVES, st.integers(0, 1 << 64), st.data())
@settings(deadline=None)
def test_what_is_there_is_read_as_if_all_were(waves: list[list[int]], seed: int, data: st.DataObject):
    rows, sizes = [count for wave in waves for count in wave], [len(wave) for wave in waves]
    known = data.draw(st.integers(0, len(waves)))
    part = WaveOrder(rows[:sum(sizes[:known])], sizes[:known], seed, whole=False, block_rows=4)
    assert part.total == sum(rows[:sum(sizes[:known])])
    everything = WaveOrder(rows, sizes, seed, block_rows=4)
    positions = np.arange(part.total)
    for ours, theirs in zip(part.locate(positions), everything.locate(positions)):
        assert np.array_equal(ours, theirs)
    with pytest.raises(ValueError, match="waves so far end"):
        part.locate(np.array([part.total]))


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4), st.integers(1, 4),
       st.integers(1, 5), st.integers(0, 1 << 64))
@settings(deadline=None, max_examples=40)
def test_each_pass_over_a_wave_has_its_groups_once_and_whole(waves: list[list[int]], count: int, group: int, seed: int):
    rows = [groups * group for wave in waves for groups in wave]
    order = WaveOrder(rows, [len(wave) for wave in waves], seed, passes=Passes(count, group), block_rows=3)
    assert order.total == count * sum(rows)
    shards, places = order.locate(np.arange(2 * order.total))
    numbers, passes = order.passes(np.arange(2 * order.total))
    firsts = places[::group]
    assert np.all(firsts % group == 0)
    assert np.array_equal(places, np.repeat(firsts, group) + np.tile(np.arange(group), len(firsts)))
    wave_of = np.repeat(np.arange(len(waves)), [len(wave) for wave in waves])
    assert np.array_equal(wave_of[shards], numbers)
    every = [(shard, row) for shard, size in enumerate(rows) for row in range(size)]
    for number in range(2 * count):
        chosen = passes == number
        assert sorted(zip(shards[chosen].tolist(), places[chosen].tolist())) == every
        behind = np.flatnonzero(chosen)[-1] + 1
        assert order.complete_rows(int(behind), number) == sum(rows)
        assert order.complete_rows(int(behind) - 1, number) == sum(rows) - group * sum(waves[-1])
    assert np.all(np.diff(numbers[:order.total]) >= 0), "a wave is left after its last pass"


def test_known_values():
    """A change of the order would make old runs unrepeatable: this must never change."""
    shards, rows = WaveOrder([5, 9, 1, 4], [2, 0, 2], 7, block_rows=2, window_blocks=3).locate(np.arange(21))
    assert shards.tolist() == KNOWN[0]
    assert rows.tolist() == KNOWN[1]


KNOWN = ([1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 1, 1],
         [2, 4, 0, 3, 1, 4, 7, 3, 1, 0, 2, 8, 6, 5, 0, 2, 3, 1, 0, 7, 5])


def test_waves_and_epochs_are_shuffled_differently():
    order = WaveOrder([500, 500], [1, 1], 3)
    rows = order.locate(np.arange(2000))[1].reshape(4, 500)
    for one in range(4):
        for other in range(one):
            assert np.sum(rows[one] == rows[other]) < 20


def grown(folder: Path) -> tuple[storage.Store, Manifest]:
    """A finished set in waves, and its records, which its manifest does not hide."""
    manifest = write_set(folder, ROWS, waves=SIZES)
    folder_store = storage.store(folder)
    known = growing.begin(folder_store, Growing.of(manifest).head().manifest)
    for shards in growing._waves(manifest):
        known = growing.publish(folder_store, known, shards)
    assert replace(known.manifest, documents=manifest.documents) == manifest
    return folder_store, manifest


def test_a_set_is_the_same_while_it_grows(tmp_path: Path):
    place, manifest = grown(tmp_path)
    whole = open_source(str(tmp_path), None, 3)
    assert read_manifest(place) == manifest
    assert growing.read_set(place) == manifest
    assert verify(str(tmp_path)) == []
    assert inspect(str(tmp_path))["waves"] == SIZES
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ShardError, match="a pipeline is still writing this set"):
        open_source(str(tmp_path), None, 3)
    for known in range(len(SIZES), -1, -1):
        if known < len(SIZES):
            place.delete(wave_key(known))
        part = open_source(str(tmp_path), None, 3, partly=True)
        assert part.manifest.waves == SIZES[:known]
        assert part.hash == whole.hash != manifest.hash
        assert part.reach == (None if known == len(SIZES) else sum(ROWS[:sum(SIZES[:known])]))
        rows = part.manifest.rows
        assert part.ids(0, rows) == whole.ids(0, rows)
        if rows:
            assert np.array_equal(SourceReader(part).read(np.arange(rows)).tokens,
                                  SourceReader(whole).read(np.arange(rows)).tokens)


def test_a_reader_follows_a_set_that_grows(tmp_path: Path):
    _, manifest = grown(tmp_path)
    whole, source = open_source(str(tmp_path), None, 3), Source.single(
        str(tmp_path), Growing.of(manifest).head().manifest, 3)
    reader, known = SourceReader(source), Growing.of(manifest).head()
    for values in Growing.of(manifest).records():
        known = known.grown(values, "here")
        source.grow(known.manifest)
        for start in range(0, (source.reach or 22) - 1, 2):  # in steps, so that positions are located ahead
            assert reader.read(np.arange(start, start + 2)).ids == whole.ids(start, 2)
    assert source.reach is None
    assert reader.read(np.arange(30, 50)).ids == whole.ids(30, 20)


def test_without_waves_nothing_changes(tmp_path: Path):
    manifest = write_set(tmp_path, ROWS)
    assert "waves" not in json.loads((tmp_path / "manifest.json").read_text())
    assert "to_come" not in manifest.canonical()
    assert growing.identity(manifest) == manifest.hash
    source = open_source(str(tmp_path), None, 3, partly=True)
    assert isinstance(source.orders[0], Order)
    assert (source.hash, source.reach) == (manifest.hash, None)


def test_other_sets_have_another_identity(tmp_path: Path):
    _, manifest = grown(tmp_path)
    others = [replace(manifest, recipe_hash="other"), replace(manifest, waves=(2, 3)),
              replace(manifest, tokenizer={**manifest.tokenizer, "eos": 2})]
    assert len({growing.identity(item) for item in (manifest, *others)}) == 4
    dealt = replace(manifest, waves=(1, 2, 0, 2))
    assert growing.identity(dealt) == growing.identity(manifest)  # known before the rows
    assert Growing.of(dealt).hashes[1:] != Growing.of(manifest).hashes[1:]


@pytest.mark.parametrize(("path", "value"), [
    (("number",), 2), (("number",), True), (("number",), -1), (("before",), "blake3-" + "0" * 64), (("before",), 1),
    (("hash",), "blake3-" + "0" * 64), (("hash",), None), (("format",), 2), (("shards",), {}), (("shards", 0), None),
    (("shards", 0, "name"), "../evil.arrow"), (("shards", 0, "rows"), 0), (("shards", 0, "rows"), 8),
    (("shards", 0, "tokens"), 10**9), (("shards", 0, "bytes"), 1.5), (("shards", 0, "hash"), "md5-1"), ((), []),
], ids=str)
def test_every_field_of_a_wave_is_checked(path: tuple, value: object, tmp_path: Path):
    grown(tmp_path)
    (tmp_path / "manifest.json").unlink()
    change(tmp_path / wave_key(1), path, value)
    with pytest.raises(ShardError) as caught:
        open_source(str(tmp_path), None, 3, partly=True)
    assert str(tmp_path / wave_key(1)) in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(("path", "value"), [
    (("waves",), 0), (("waves",), [2]), (("waves",), 1 << 40), (("kind",), "preferences"), (("format",), 2),
    (("tokenizer", "file"), "../../etc/passwd"), (("sequence_length",), 0), (("recipe_hash",), None), ((), 3),
], ids=str)
def test_every_field_of_the_head_is_checked(path: tuple, value: object, tmp_path: Path):
    grown(tmp_path)
    (tmp_path / "manifest.json").unlink()
    change(tmp_path / "growing.json", path, value)
    with pytest.raises(ShardError) as caught:
        open_source(str(tmp_path), None, 3, partly=True)
    assert "growing.json" in str(caught.value)


@pytest.mark.parametrize("value", [[2, 1], [5, -1], [2.0, 3], 5, [2, 1, 0, 2, True]], ids=str)
def test_waves_of_a_manifest_are_checked(value: object, tmp_path: Path):
    grown(tmp_path)
    change(tmp_path / "manifest.json", ("waves",), value)
    with pytest.raises(ShardError, match="waves is"):
        read_manifest(storage.store(tmp_path))


def test_a_torn_record_and_those_of_another_pipeline(tmp_path: Path):
    place, manifest = grown(tmp_path / "set")
    other, _ = grown(tmp_path / "other")
    place.delete("manifest.json")
    text = place.read(wave_key(2))
    place.write(wave_key(2), text[:40])
    with pytest.raises(ShardError, match="JSON"):
        growing.read_set(place)
    place.write(wave_key(2), text)
    head = Growing.of(replace(manifest, recipe_hash="another")).head().manifest
    known = growing.begin(other, head)
    assert other.list("waves") == []  # what an earlier one left is gone
    growing.publish(other, known, manifest.shards[:2])
    place.write(wave_key(0), other.read(wave_key(0)))
    with pytest.raises(ShardError, match="rewritten with other content"):
        growing.read_set(place)


def change(file: Path, path: tuple, value: object) -> None:
    values = json.loads(file.read_text())
    node = values
    for part in path[:-1]:
        node = node[part]
    if path:
        node[path[-1]] = value
    else:
        values = value
    file.write_text(json.dumps(values))
