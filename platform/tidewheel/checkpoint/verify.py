"""List and verify checkpoints. This module does not import torch, so that the command line answers at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from tidewheel import storage
from tidewheel.checkpoint.manifest import KEY, NAME, CheckpointManifest, parse_manifest, read_manifest, step_of
from tidewheel.checkpoint.suspects import Suspects
from tidewheel.commit_log import CommitLog, epoch_of
from tidewheel.errors import CheckpointError, StorageError
from tidewheel.storage import Stamp, Store


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint folder, as a listing shows it."""

    name: str
    """"step_00000100", or "step_00000100-g3" when worker group 3 wrote a step that others had written before."""
    step: int
    complete: bool
    """Committed, and all its files exist with the right length. Their content has not been read."""
    committed: bool
    """The run's commit log names it. Without a log: a manifest.json exists, even a damaged one."""
    bytes: int
    """Total size of the files in the folder."""
    world_size: int
    """Number of ranks that wrote it; 0 when there is no valid manifest."""
    problem: str
    """Why it is not complete; "" when it is."""
    validation_loss: float | None = None
    """Measured at this step; None: not measured."""
    keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of all objects in the folder."""
    files: tuple[str, ...] = field(default=(), repr=False)
    """Names of the files in its manifest, and of the manifest."""
    generation: int = 0
    """Number of the worker group that wrote it."""
    before_decay: bool = False
    """Whether the schedule's final decay begins later, so that a run with more steps continues from here."""
    verified: int | None = None
    """Last step that was known good when it was saved; None: nobody checked."""
    suspect: bool = False
    """It may hold silent corruption, see `suspects`."""


def list_checkpoints(store: Store) -> list[CheckpointInfo]:
    """Return the checkpoints under `store` (a run's `checkpoints` folder), partial ones included, the newest last.

    The newest is the one that was committed last. Its step need not be the highest: a driver that takes the run over
    continues from its predecessor's last commit. Partial checkpoints come first, by step.

    This costs one listing, a read of the commit log's head and a read of each manifest, whatever the number of files.
    """
    head = CommitLog(store).head()
    order = {} if head is None else {name: index for index, name in enumerate(head.checkpoints)}
    folders: dict[str, dict[str, int]] = {}
    entries = store.list()
    for entry in entries:
        name, _, key = entry.key.partition("/")
        if key and NAME.fullmatch(name):
            folders.setdefault(name, {})[key] = entry.bytes
    suspects = Suspects.among(store, (entry.key for entry in entries))
    checkpoints = [_judged(_info(store, name, sizes), suspects) for name, sizes in folders.items()]
    if head is None:
        return sorted(checkpoints, key=lambda info: info.step)
    checkpoints = [info if info.name in order else _uncommitted(info) for info in checkpoints]
    return sorted(checkpoints, key=lambda info: (order.get(info.name, -1), info.step))


def newest_committed(store: Store, *, seconds: float | None = None) -> tuple[int, int]:
    """Return (epoch, step) of the newest committed checkpoint that is not suspect, intact or not; (0, 0) without one.

    Args:
        store: a run's `checkpoints` folder.
        seconds: time limit; None: the store's own.

    Raises:
        StorageError: the store does not answer, or not within `seconds`.
    """
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(_newest_committed, store).result(timeout=seconds)
    except TimeoutError:
        raise StorageError(f"no answer within {seconds} s", where=store.uri, fix="wait for the store") from None
    finally:
        pool.shutdown(wait=False)


def _newest_committed(store: Store) -> tuple[int, int]:
    if Suspects.of(store).after:  # manifests say which are: reading them all is slow, and rarely necessary
        good = [info for info in list_checkpoints(store) if info.committed and not info.suspect]
        return (epoch_of(good[-1].generation), good[-1].step) if good else (0, 0)
    head = CommitLog(store).head()
    if head is not None:
        names = [name for name in head.checkpoints if NAME.fullmatch(name)]
        return (epoch_of(max(head.generation, 0)), step_of(names[-1])) if names else (0, 0)
    folders = [entry.key.partition("/")[0] for entry in store.list() if entry.key.endswith(f"/{KEY}")]
    return 0, max((step_of(name) for name in folders if NAME.fullmatch(name)), default=0)


def _uncommitted(info: CheckpointInfo) -> CheckpointInfo:
    problem = info.problem or "not committed: its writer was stopped, or no longer owned the run"
    return replace(info, committed=False, complete=False, problem=problem)


def _judged(info: CheckpointInfo, suspects: Suspects) -> CheckpointInfo:
    if not suspects.cover(info.step, info.generation):
        return info
    problem = "; ".join(filter(None, ("suspect: saved after corruption that was found later", info.problem)))
    return replace(info, complete=False, problem=problem, suspect=True)


def _info(store: Store, name: str, sizes: dict[str, int]) -> CheckpointInfo:
    problem, manifest = "", None
    try:
        manifest = read_manifest(store, name)
        problem = "; ".join(_missing(manifest, sizes))
    except CheckpointError as error:
        problem = error.what
    except StorageError as error:
        problem = damage(store, error)
    files = () if manifest is None else (KEY, *(file.key for file in manifest.files))
    return CheckpointInfo(name=name, step=step_of(name), complete=not problem, committed=KEY in sizes,
                          bytes=sum(sizes.values()), world_size=manifest.world_size if manifest else 0,
                          problem=problem, validation_loss=_validation_loss(manifest),
                          keys=tuple(f"{name}/{key}" for key in sizes), files=files,
                          generation=manifest.generation if manifest else 0,
                          before_decay=manifest is not None and manifest.extra.get("before_decay") is True,
                          verified=_verified(manifest))


def _validation_loss(manifest: CheckpointManifest | None) -> float | None:
    loss = manifest.extra.get("validation_loss") if manifest is not None else None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _verified(manifest: CheckpointManifest | None) -> int | None:
    step = manifest.extra.get("verified") if manifest is not None else None
    return step if isinstance(step, int) else None


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
    """Return the run, its `checkpoints` folder and the name of one checkpoint.

    Args:
        uri: a run (its newest complete checkpoint) or one checkpoint, RUN/checkpoints/step_00000100.

    Raises:
        CheckpointError: there is no such checkpoint, or the run has no complete one.
    """
    parent, _, name = storage.absolute(uri).rstrip("/").rpartition("/")
    if NAME.fullmatch(name):
        checkpoints = storage.store(parent)
        if not checkpoints.list(name):
            raise CheckpointError(f"there is no checkpoint {name!r}", where=parent,
                                  fix="`tidewheel checkpoint list RUN` shows the checkpoints of a run")
        return storage.store(parent.rpartition("/")[0]), checkpoints, name
    run = storage.store(uri)
    checkpoints = run.child("checkpoints")
    complete = [info.name for info in list_checkpoints(checkpoints) if info.complete]
    if not complete:
        raise CheckpointError("there is no complete checkpoint", where=run.uri,
                              fix="give the URI of a run that has saved one, or of a checkpoint in it")
    return run, checkpoints, complete[-1]


def of_step(store: Store, step: int) -> str:
    """Return the name of the newest complete checkpoint of a step.

    Args:
        store: a run's `checkpoints` folder.
        step: number of completed steps.

    Raises:
        CheckpointError: there is none; the error lists the steps that have one.
    """
    complete = [info for info in list_checkpoints(store) if info.complete]
    names = [info.name for info in complete if info.step == step]
    if not names:
        steps = ", ".join(f"{known:,}" for known in sorted({info.step for info in complete}))
        raise CheckpointError(f"there is no complete checkpoint of step {step:,}", where=store.uri,
                              fix=f"name one of the steps {steps}" if steps else "give a run that has saved one")
    return names[-1]


def verify_checkpoint(store: Store, name: str) -> list[str]:
    """Read every file of checkpoint `name` and compare hashes; return a line for each problem, [] if it is intact.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if not NAME.fullmatch(name) or not store.list(name):
        raise CheckpointError(f"there is no checkpoint {name!r}", where=store.uri,
                              fix="`tidewheel checkpoint list RUN` shows the checkpoints of a run")
    try:
        manifest = read_manifest(store, name)
    except CheckpointError as error:
        return [error.what]
    return verify_files(store, name, manifest.files)


def check_files(store: Store, name: str, manifest: CheckpointManifest) -> None:
    """Read all files of a checkpoint and compare hashes.

    Args:
        store: the `checkpoints` folder.
        name: the checkpoint.
        manifest: its manifest.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if problems := verify_files(store, name, manifest.files):
        raise CheckpointError("; ".join(problems)[:500], where=store.at(name),
                              fix="`tidewheel checkpoint verify RUN` shows which are intact: take one of those, or "
                              "restore the files from a copy")


def verify_files(store: Store, name: str, files: Iterable[Stamp]) -> list[str]:
    """Read files of a checkpoint and compare hashes; return a line for each problem.

    Args:
        store: a run's `checkpoints` folder.
        name: the checkpoint.
        files: names inside the checkpoint's folder, with their lengths and hashes.

    Raises:
        StorageError: the store does not answer, which says nothing about the files.
    """
    problems = []
    for file in files:
        try:
            differs = store.verify(Stamp(f"{name}/{file.key}", file.bytes, file.hash))
        except StorageError as error:
            differs = damage(store, error)
        if differs:
            problems.append(f"{file.key}: {differs}")
    return problems


def damage(store: Store, error: StorageError) -> str:
    """Return the problem of a file that cannot be read: a bad sector is damage.

    Args:
        store: where it is.
        error: of reading it.

    Raises:
        StorageError: the store does not answer, which is no damage.
    """
    store.check()
    return error.what


def parse_text(store: Store, name: str, text: str) -> CheckpointManifest:
    """Return the manifest in `text`, which another rank has read.

    Args:
        store: a run's `checkpoints` folder.
        name: the checkpoint.
        text: content of its manifest.json.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    return parse_manifest(text.encode(), name, store.at(f"{name}/{KEY}"))
