"""Which checkpoints there are, and whether they are intact. No torch in here: the command line answers at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tidewheel import storage
from tidewheel.checkpoint.manifest import KEY, NAME, CheckpointManifest, parse_manifest, read_manifest
from tidewheel.errors import CheckpointError, StorageError
from tidewheel.storage import Stamp, Store


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint folder, as far as a listing tells."""

    name: str
    """"step_00000100"."""
    step: int
    complete: bool
    """Committed, and all its files are there with the right length; their content was not read."""
    committed: bool
    """There is a manifest.json, be it damaged."""
    bytes: int
    """Of all files in the folder."""
    world_size: int
    """Ranks that wrote it; 0 when there is no valid manifest."""
    problem: str
    """Why it is not complete; "" when it is."""
    validation_loss: float | None = None
    """Measured at its step; None: it was not."""
    keys: tuple[str, ...] = field(default=(), repr=False)
    """All objects in the folder."""
    files: tuple[str, ...] = field(default=(), repr=False)
    """Those its manifest names, and the manifest."""


def list_checkpoints(store: Store) -> list[CheckpointInfo]:
    """The checkpoints under `store` (a run's `checkpoints` folder), oldest step first, partial ones included.

    One listing and a read of each manifest, whatever the number of files.
    """
    folders: dict[str, dict[str, int]] = {}
    for entry in store.list():
        name, _, key = entry.key.partition("/")
        if key and NAME.fullmatch(name):
            folders.setdefault(name, {})[key] = entry.bytes
    found = [_info(store, name, sizes) for name, sizes in folders.items()]
    return sorted(found, key=lambda info: info.step)


def newest_committed(store: Store, *, seconds: float | None = None) -> int:
    """Step of the newest checkpoint with a manifest, intact or not, by one listing; 0 when there is none.

    Raises:
        StorageError: the store does not answer, or not within `seconds`.
    """
    pool = ThreadPoolExecutor(1)
    try:
        entries = pool.submit(store.list).result(timeout=seconds)
    except TimeoutError:
        raise StorageError(f"no answer within {seconds} s", where=store.uri, mend="wait for the store") from None
    finally:
        pool.shutdown(wait=False)
    committed = [entry.key.partition("/")[0] for entry in entries if entry.key.endswith(f"/{KEY}")]
    return max((int(name.partition("_")[2]) for name in committed if NAME.fullmatch(name)), default=0)


def _info(store: Store, name: str, sizes: dict[str, int]) -> CheckpointInfo:
    problem, manifest = "", None
    try:
        manifest = read_manifest(store, name)
        problem = "; ".join(_missing(manifest, sizes))
    except CheckpointError as error:
        problem = error.what
    except StorageError as error:
        problem = _damage(store, error)
    files = () if manifest is None else (KEY, *(file.key for file in manifest.files))
    return CheckpointInfo(name=name, step=int(name.partition("_")[2]), complete=not problem, committed=KEY in sizes,
                          bytes=sum(sizes.values()), world_size=manifest.world_size if manifest else 0,
                          problem=problem, validation_loss=_validation_loss(manifest),
                          keys=tuple(f"{name}/{key}" for key in sizes), files=files)


def _validation_loss(manifest: CheckpointManifest | None) -> float | None:
    loss = manifest.extra.get("validation_loss") if manifest is not None else None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _missing(manifest: CheckpointManifest, sizes: dict[str, int]) -> list[str]:
    problems = []
    for file in manifest.files:
        size = sizes.get(file.key)
        if size is None:
            problems.append(f"{file.key}: missing")
        elif size != file.bytes:
            problems.append(f"{file.key}: {size} bytes, expected {file.bytes}")
    return problems


def locate(uri: str) -> tuple[Store, Store, str]:
    """The run, its `checkpoints` folder and one checkpoint's name, of a run's URI or RUN/checkpoints/step_00000100.

    Of a run it is the newest complete checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    above, _, name = storage.absolute(uri).rstrip("/").rpartition("/")
    if NAME.fullmatch(name):
        place = storage.store(above)
        if not place.list(name):
            raise CheckpointError(f"there is no checkpoint {name!r}", where=above,
                                  mend="`tidewheel checkpoint list RUN` shows those there are")
        return storage.store(above.rpartition("/")[0]), place, name
    run = storage.store(uri)
    place = run.child("checkpoints")
    complete = [info.name for info in list_checkpoints(place) if info.complete]
    if not complete:
        raise CheckpointError("there is no complete checkpoint", where=run.uri,
                              mend="give the URI of a run that has saved one, or of a checkpoint in it")
    return run, place, complete[-1]


def verify_checkpoint(store: Store, name: str) -> list[str]:
    """Read every file of checkpoint `name` and compare hashes; one line for each problem, [] when it is intact.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if not NAME.fullmatch(name) or not store.list(name):
        raise CheckpointError(f"there is no checkpoint {name!r}", where=store.uri,
                              mend="`tidewheel checkpoint list RUN` shows those there are")
    try:
        manifest = read_manifest(store, name)
    except CheckpointError as error:
        return [error.what]
    return verify_files(store, name, manifest.files)


def verify_files(store: Store, name: str, files: Iterable[Stamp]) -> list[str]:
    """What is wrong with `files` of checkpoint `name`, having read them.

    Raises:
        StorageError: the store does not answer, which says nothing about the files.
    """
    problems = []
    for file in files:
        try:
            differs = store.verify(Stamp(f"{name}/{file.key}", file.bytes, file.hash))
        except StorageError as error:
            differs = _damage(store, error)
        if differs:
            problems.append(f"{file.key}: {differs}")
    return problems


def _damage(store: Store, error: StorageError) -> str:
    """What to say of a file that cannot be read: a bad sector is damage like any other, a store that is away is not."""
    store.check()
    return error.what


def parse_text(store: Store, name: str, text: str) -> CheckpointManifest:
    """The manifest in `text`, which another rank read."""
    return parse_manifest(text.encode(), name, store.at(f"{name}/{KEY}"))
