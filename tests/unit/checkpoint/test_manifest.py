"""A manifest survives the conversion to JSON and back; a hostile one is refused even with a valid hash."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tidewheel.checkpoint.manifest import CheckpointManifest, _self_hash, parse_manifest
from tidewheel.checkpoint.sharding import Box, Cut, Sharding
from tidewheel.checkpoint.tensor_entry import Chunk, RankFile, TensorEntry
from tidewheel.errors import CheckpointError

LISTED = CheckpointManifest(
    step=5, world_size=2, time=1.5,
    files=(RankFile("a", 100, "blake3-" + "0" * 64, 0), RankFile("b", 9, "blake3-" + "1" * 64, 1)),
    tensors={"m/w": TensorEntry("float32", (3, 4), (Chunk(0, 0, (0, 0), (2, 4)), Chunk(0, 40, (2, 0), (1, 4)))),
             "m/s": TensorEntry("bool", (), (Chunk(1, 8, (), ()),))}, extra={"step": 5, "nested": [1.25, None]})
RULED = CheckpointManifest(
    step=5, world_size=4, time=1.5,
    files=(RankFile("a", 8 + 32, "blake3-" + "0" * 64, 0, 8), RankFile("b", 16 + 16 + 1, "blake3-" + "1" * 64, 2, 16)),
    tensors={"m/w": TensorEntry("float32", (3, 4), shared=Sharding((3, 4), (Cut(0, 2, 2),))),
             "m/s": TensorEntry("bool", (), shared=Sharding((), (), 2)),
             "m/a": TensorEntry("bool", (0, 4), shared=Sharding((0, 4), (Cut(0, 4, 1),)))}, extra={})


@pytest.mark.parametrize("manifest", [LISTED, RULED], ids=["listed", "ruled"])
def test_a_manifest_is_decoded_as_it_was(manifest: CheckpointManifest):
    assert parse_manifest(manifest.to_json(), "step_00000005", "here") == manifest


def test_total_bytes():
    assert LISTED.total_bytes == 109


def test_positions_follow_from_the_rule():
    assert list(RULED.chunks("m/w")) == [Chunk(0, 8, (0, 0), (2, 4)), Chunk(1, 16, (2, 0), (1, 4))]
    assert list(RULED.chunks("m/w", Box((2, 1), (1, 1)))) == [Chunk(1, 16, (2, 0), (1, 4))]
    assert list(RULED.chunks("m/s")) == [Chunk(1, 32, (), ())]  # behind the wider elements
    assert not list(RULED.chunks("m/a"))


def test_a_checkpoint_of_the_first_format_is_read():
    values = json.loads(LISTED.to_json())
    del values["manifest_hash"]
    values["format"] = 1
    for file in values["files"]:
        del file["rank"], file["head"]
    text = json.dumps({**values, "manifest_hash": _self_hash(values)}).encode()
    assert parse_manifest(text, "step_00000005", "here") == LISTED


def test_model_hashes_tell_layouts_and_contents_apart():
    renamed = {path.replace("m/", "model/"): entry for path, entry in RULED.tensors.items()}
    manifest = replace(RULED, tensors=renamed)
    other_rule = {**renamed, "model/w": TensorEntry("float32", (3, 4), shared=Sharding((3, 4), (Cut(1, 2, 2),)))}
    other_file = (replace(RULED.files[0], hash="blake3-" + "2" * 64), RULED.files[1])
    hashes = {manifest.model_hash, replace(manifest, tensors=other_rule).model_hash,
              replace(manifest, files=other_file).model_hash}
    assert len(hashes) == 3
    assert replace(manifest, step=6, time=2.0, extra={"a": 1}).model_hash == manifest.model_hash


def edited(manifest: CheckpointManifest, path: tuple, value: Any) -> bytes:
    values = json.loads(manifest.to_json())
    del values["manifest_hash"]
    node = values
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    return json.dumps({**values, "manifest_hash": _self_hash(values)}).encode()


@pytest.mark.parametrize(("path", "value"), [
    (("files", 0, "key"), "../../etc/passwd"), (("files", 0, "key"), "/etc/passwd"), (("files", 0, "key"), "a/b"),
    (("files", 0, "key"), None), (("files", 0, "hash"), "x"), (("files", 0, "bytes"), -1), (("files",), None),
    (("files", 0, "rank"), 1), (("files", 0, "rank"), None), (("files", 0, "head"), -1),
    (("step",), 6), (("step",), True), (("format",), 3), (("extra",), []), (("world_size",), "2"), (("time",), None),
    (("tensors", "m/w", "dtype"), "object"), (("tensors", "m/w", "dtype"), "__class__"),
    (("tensors", "m/w", "shape"), [3, 5]), (("tensors", "m/w", "shape"), [10**9, 10**9]),
    (("tensors", "m/w", "chunks"), []), (("tensors", "m/w", "chunks", 0), [0, 90, [0, 0], [2, 4]]),
    (("tensors", "m/w", "chunks", 0), [7, 0, [0, 0], [2, 4]]),
    (("tensors", "m/w", "chunks", 0), [-1, 0, [0, 0], [2, 4]]), (("tensors", "m/w", "chunks", 0), [0, 0, [0], [8]]),
    (("tensors", "m/w", "chunks", 1), [0, 0, [3, 0], [1, 4]]),
    (("tensors", "m/w"), 3), (("tensors",), [1]),
], ids=str)
def test_every_field_is_checked(path: tuple, value: Any):
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        parse_manifest(edited(LISTED, path, value), "step_00000005", "here")


@pytest.mark.parametrize(("path", "value"), [
    (("cuts",), None), (("cuts",), 3), (("cuts", 0), [0, 2]), (("cuts", 0), [2, 2, 2]), (("cuts", 0), [-1, 2, 2]),
    (("cuts", 0), [0, 0, 2]), (("cuts", 0), [0, 2, 0]), (("cuts", 0), [0, 5, 1]), (("cuts", 0), [0, 1 << 62, 1]),
    (("cuts",), [[0, 2, 1], [1, 2, 1]]), (("first",), 2), (("first",), -1), (("first",), None),
    (("shape",), [4, 4]), (("shape",), [10**9, 10**9]), (("dtype",), "float64"),
], ids=str)
def test_every_field_of_a_rule_is_checked(path: tuple, value: Any):
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        parse_manifest(edited(RULED, ("tensors", "m/w", *path), value), "step_00000005", "here")


@pytest.mark.parametrize("files", [RULED.files[:1], (replace(RULED.files[0], rank=1), RULED.files[1]),
                                   (replace(RULED.files[0], head=7), RULED.files[1])], ids=["gone", "moved", "head"])
def test_parts_without_their_file_are_noticed(files: tuple[RankFile, ...]):
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        list(replace(RULED, files=files).chunks("m/w"))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b"[" * 100_000], ids=lambda d: repr(d[:8]))
def test_other_data_is_refused(data: bytes):
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        parse_manifest(data, "step_00000005", "here")
