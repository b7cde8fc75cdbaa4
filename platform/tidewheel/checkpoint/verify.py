"""Listing checkpoints and checking that they are what was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tidewheel.checkpoint.manifest import MANIFEST_KEY, checkpoint_name, read_checkpoint_manifest, step_of
from tidewheel.errors import CheckpointError
from tidewheel.storage import Stamp, Store, join, store


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint folder.

    Attributes:
        name: "step_00000100".
        step: optimizer steps done.
        complete: it has a valid manifest; its files may still be damaged (`verify_checkpoint` reads them).
        problem: why it is not complete.
        bytes: length of its files.
        world_size: ranks that wrote it; 0 when unknown.
    """

    name: str
    step: int
    complete: bool
    problem: str
    bytes: int
    world_size: int


def checkpoint_store(place: Store, name: str) -> Store:
    """The folder of checkpoint `name` below `place`."""
    return place.child(name)


def list_checkpoints(place: Store) -> list[CheckpointInfo]:
    """The checkpoints below `place`, oldest first; folders that were never committed are in the list too."""
    sizes: dict[str, int] = {}
    for entry in place.list():
        name, _, rest = entry.key.partition("/")
        if rest and step_of(name) is not None:
            sizes[name] = sizes.get(name, 0) + entry.bytes
    return [_info(place, name, sizes[name]) for name in sorted(sizes, key=lambda name: step_of(name) or 0)]


def _info(place: Store, name: str, size: int) -> CheckpointInfo:
    step = step_of(name) or 0
    try:
        manifest = read_checkpoint_manifest(checkpoint_store(place, name))
    except FileNotFoundError:
        return CheckpointInfo(name, step, False, f"no {MANIFEST_KEY}: it was never committed", size, 0)
    except CheckpointError as error:
        return CheckpointInfo(name, step, False, error.what, size, 0)
    if manifest.step != step:
        return CheckpointInfo(name, step, False, f"its manifest is that of step {manifest.step}", size, 0)
    return CheckpointInfo(name, step, True, "", manifest.bytes, manifest.world_size)


def verify_checkpoint(place: Store, name: str) -> list[str]:
    """Everything wrong with checkpoint `name` below `place`: reads every file and compares hashes. [] when intact.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if step_of(name) is None or not place.list(name):
        raise CheckpointError(f"no checkpoint {name!r}", where=place.uri,
                              mend=f"names look like {checkpoint_name(100)}; `tidewheel checkpoint list` shows them")
    info = _info(place, name, 0)
    if not info.complete:
        return [info.problem]
    return damaged_files(checkpoint_store(place, name), read_checkpoint_manifest(checkpoint_store(place, name)).files)


def damaged_files(folder: Store, files: Iterable[Stamp]) -> list[str]:
    """What is wrong with each damaged file among `files`."""
    found = ((stamp.key, folder.verify(stamp)) for stamp in files)
    return [f"{key}: {wrong}" for key, wrong in found if wrong]


def checkpoints_of(run_uri: str) -> Store:
    """Where a run keeps its checkpoints."""
    return store(join(run_uri, "checkpoints"))
