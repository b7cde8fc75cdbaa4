"""Durable units: keys, publication, resumption, and bytes that depend on rows alone."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidewheel.data import stage
from tidewheel.data.stage import Published, Unit, UnitWriter, lookup, published, unit_key
from tidewheel.errors import StorageError
from tidewheel.storage import Stamp, store
from tidewheel.versions import Version

ONE = Version("c")
TABLE = pa.table({"id": [f"d{number}" for number in range(20_000)], "value": list(range(20_000))})


@pytest.fixture
def unit():
    return Unit("stage", "part-00000", unit_key("stage", settings={"a": 1}, version=Version("c"), inputs=["x"]))


def write(tmp_path, unit, table=TABLE):
    writer = UnitWriter(str(tmp_path), unit)
    writer.table("rows", table)
    writer.shared("verdicts", "verdicts/stage", ".parquet", b"verdicts")
    return writer.publish({"documents": 3, "share": 0.1})


def test_a_unit_is_found_only_after_publishing(tmp_path, unit):
    folder_store = store(tmp_path)
    assert published(folder_store, unit) is None
    writer = UnitWriter(str(tmp_path), unit)
    writer.table("rows", TABLE)
    assert published(folder_store, unit) is None, "files without a manifest are no unit"
    writer.publish({"documents": 20_000})
    result = published(folder_store, unit)
    assert result is not None
    assert result.summary == {"documents": 20_000}
    assert stage.read_table(folder_store, result.files["rows"]).equals(TABLE)


def test_publishing_again_changes_no_byte(tmp_path, unit):
    write(tmp_path, unit)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    rechunked = pa.concat_tables([TABLE.slice(0, 7), TABLE.slice(7, 12_000), TABLE.slice(12_007)])
    write(tmp_path, unit, rechunked)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_keys_differ_for_every_decisive_input():
    def key(name="s", settings=None, version=ONE, inputs=("x", "y")):
        return unit_key(name, settings=settings or {"a": 1, "b": 2}, version=version, inputs=inputs)

    assert key(settings={"b": 2, "a": 1}) == key()
    others = [key("t"), key(settings={"a": 1}), key(version=Version("c", 2)),
              key(version=Version("c", uses=(Version("d"),))), key(version=None),
              key(inputs=("y", "x")), key(inputs=("xy",)), key()]
    assert len(set(others)) == 8
    assert all(len(other) == 32 for other in others)


@pytest.mark.parametrize("damage", ["manifest_cut", "manifest_changed", "manifest_empty", "file_cut", "file_gone",
                                    "shared_gone"])
def test_damaged_units_count_as_missing(tmp_path, unit, damage):
    done = write(tmp_path, unit)
    manifest = tmp_path / unit.manifest_key
    rows, shared = tmp_path / done.files["rows"].key, tmp_path / done.files["verdicts"].key
    if damage == "manifest_cut":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    elif damage == "manifest_changed":
        manifest.write_text(manifest.read_text().replace('"documents": 3', '"documents": 4'))
    elif damage == "manifest_empty":
        manifest.write_bytes(b"")
    elif damage == "file_cut":
        rows.write_bytes(rows.read_bytes()[:-1])
    elif damage == "file_gone":
        rows.unlink()
    else:
        shared.unlink()
    assert published(store(tmp_path), unit) is None
    write(tmp_path, unit)
    assert published(store(tmp_path), unit) is not None


@pytest.mark.parametrize("how", [stage.read_table, lambda place, stamp: list(stage.read_batches(place, stamp))])
@pytest.mark.parametrize("position", [0.0, 0.3, 0.7, 0.999])
def test_a_flipped_byte_raises_on_read(tmp_path, unit, how, position):
    stamp = write(tmp_path, unit).files["rows"]
    path = tmp_path / stamp.key
    data = bytearray(path.read_bytes())
    data[int(position * len(data))] ^= 0x40
    path.write_bytes(data)
    assert published(store(tmp_path), unit) is not None, "lookup is cheap: it compares lengths"
    assert published(store(tmp_path), unit, verify=True) is None
    with pytest.raises(StorageError, match="not what was written"):
        how(store(tmp_path), stamp)


def test_batches_and_columns_are_read(tmp_path, unit):
    stamp = write(tmp_path, unit).files["rows"]
    assert pa.Table.from_batches(stage.read_batches(store(tmp_path), stamp)).equals(TABLE)
    assert stage.read_table(store(tmp_path), stamp, ["value"]).equals(TABLE.select(["value"]))
    with pytest.raises(StorageError):
        stage.read_table(store(tmp_path), Stamp("stages/none", 1, stamp.hash))


def test_lookup_returns_current_labels(tmp_path, unit):
    write(tmp_path, unit)
    renamed = Unit("stage", "other name", unit.key, 5)
    missing = Unit("stage", "part-00001", "0" * 32)
    result = lookup(store(tmp_path), [renamed, missing])
    assert list(result) == [unit.key]
    assert result[unit.key].unit == renamed


def test_manifests_round_trip_as_json(tmp_path, unit):
    done = write(tmp_path, unit)
    again = Published.from_json(done.to_json())
    assert again == done
    assert again.content() == done.content()
