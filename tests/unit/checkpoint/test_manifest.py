"""A manifest survives the conversion to JSON and back; a hostile one is refused even with a valid hash."""

import json
from typing import Any

import pytest

from tidewheel.checkpoint.manifest import CheckpointManifest, Chunk, TensorEntry, _self_hash, parse_manifest
from tidewheel.errors import CheckpointError
from tidewheel.storage import Stamp

MANIFEST = CheckpointManifest(
    step=5, world_size=2, time=1.5, files=(Stamp("a", 100, "blake3-" + "0" * 64), Stamp("b", 9, "blake3-" + "1" * 64)),
    tensors={"m/w": TensorEntry("float32", (3, 4), (Chunk(0, 0, (0, 0), (2, 4)), Chunk(0, 40, (2, 0), (1, 4)))),
             "m/s": TensorEntry("bool", (), (Chunk(1, 8, (), ()),))}, extra={"step": 5, "nested": [1.25, None]})


def test_a_manifest_is_decoded_as_it_was():
    assert parse_manifest(MANIFEST.to_json(), "step_00000005", "here") == MANIFEST
    assert MANIFEST.total_bytes == 109


def edited(path: tuple, value: Any) -> bytes:
    values = json.loads(MANIFEST.to_json())
    del values["manifest_hash"]
    node = values
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    return json.dumps({**values, "manifest_hash": _self_hash(values)}).encode()


@pytest.mark.parametrize(("path", "value"), [
    (("files", 0, "key"), "../../etc/passwd"), (("files", 0, "key"), "/etc/passwd"), (("files", 0, "key"), "a/b"),
    (("files", 0, "key"), None), (("files", 0, "hash"), "x"), (("files", 0, "bytes"), -1), (("files",), None),
    (("step",), 6), (("step",), True), (("format",), 2), (("extra",), []), (("world_size",), "2"), (("time",), None),
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
        parse_manifest(edited(path, value), "step_00000005", "here")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b"[" * 100_000], ids=lambda d: repr(d[:8]))
def test_other_data_is_refused(data: bytes):
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        parse_manifest(data, "step_00000005", "here")
