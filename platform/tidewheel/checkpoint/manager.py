"""Saving while training goes on, and resuming from the newest checkpoint that is intact."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import tenacity
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import DTensor

from tidewheel.checkpoint.dcp import StoreReader, StoreWriter
from tidewheel.checkpoint.manifest import CheckpointManifest, checkpoint_name, read_checkpoint_manifest
from tidewheel.checkpoint.retention import collect
from tidewheel.checkpoint.verify import damaged_files, list_checkpoints
from tidewheel.errors import CheckpointError, StorageError
from tidewheel.storage import Store

log = logging.getLogger(__name__)
ATTEMPTS = 5
LONGEST_WAIT_SECONDS = 20


class CheckpointManager:
    """Saves and loads a state {"model": {name: tensor}, "optimizer": {name: tensor}}; every rank makes the same calls.

    Args:
        store: the run's checkpoints folder.
        keep_last: newest checkpoints that stay.
        on_event: told, on rank 0, of "commit", "save_failed" and "checkpoint_refused", with details.
        process_group: ranks that share the state; torch.distributed's default group when it is initialised. A gloo
            group of the same ranks is made for the uploads, so that they never meet the training's collectives.
        asynchronous: False waits for each save.
    """

    def __init__(self, store: Store, *, keep_last: int = 3, process_group: Any = None, asynchronous: bool = True,
                 on_event: Callable[[str, dict[str, Any]], None] | None = None) -> None:
        self._store, self._keep_last, self._asynchronous = store, keep_last, asynchronous
        self._on_event = on_event or (lambda kind, detail: None)
        self._distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank(process_group) if self._distributed else 0
        self._world_size = dist.get_world_size(process_group) if self._distributed else 1
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD) if self._distributed else None
        self._group = dist.new_group(ranks, backend="gloo") if self._distributed else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    # -- saving --------------------------------------------------------------------------------
    def save(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Copy the state, return, and write the copy in the background; waits first for a save still under way.

        A save that fails after retries is reported as "save_failed" and training goes on: the checkpoint before it is
        still there.
        """
        self._finish_pending()
        began = time.monotonic()
        staged = stage(state)
        staged_seconds = time.monotonic() - began
        self._pending = self._thread.submit(self._write, step, staged, dict(extra), staged_seconds)
        if not self._asynchronous:
            self._finish_pending()

    def wait(self) -> None:
        """Return once everything handed over is committed (or has failed and said so)."""
        self._finish_pending()

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, staged: dict[str, torch.Tensor], extra: dict[str, Any], staged_seconds: float) -> None:
        began = time.monotonic()
        name = checkpoint_name(step)
        writer = StoreWriter(self._store.child(name), step, self._world_size, extra, _with_retries)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch tells that it runs without a process group: we know
                dcp.save(staged, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False),
                         process_group=self._group, no_dist=not self._distributed)
            if self._rank == 0:
                assert writer.manifest is not None
                self._on_event("commit", {
                    "checkpoint": name, "step": step, "bytes": writer.manifest.bytes,
                    "files": len(writer.manifest.files), "stage_seconds": round(staged_seconds, 4),
                    "seconds": round(time.monotonic() - began, 4)})
                collect(self._store, step, self._keep_last)
        except (CheckpointException, StorageError, OSError, RuntimeError) as error:
            log.warning("the checkpoint of step %d could not be written: %s", step, error)
            if self._rank == 0:
                self._on_event("save_failed", {"checkpoint": name, "step": step, "reason": _reason(error)})

    # -- loading -------------------------------------------------------------------------------
    def load_latest(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Fill the tensors of `state` in place, whatever layout they have; the `extra` of the checkpoint that was used.

        The newest checkpoint whose files are all what was written wins; each one passed over is reported as
        "checkpoint_refused" with its reason. None when the run has no checkpoint yet.

        Raises:
            CheckpointError: there are committed checkpoints, but none is intact, or they do not fit the state.
        """
        refused = 0
        for name, problem in self._candidates():
            if not problem:
                folder = self._store.child(name)
                manifest = read_checkpoint_manifest(folder)
                problem = self._damage(folder, manifest)
                if not problem:
                    self._load(folder, manifest, state)
                    return manifest.extra
                refused += 1
            if self._rank == 0:
                log.warning("checkpoint %s is refused: %s", name, problem)
                self._on_event("checkpoint_refused", {"checkpoint": name, "reason": problem})
        if refused:
            raise CheckpointError(f"none of the {refused} committed checkpoints is intact", where=self._store.uri,
                                  mend="`tidewheel checkpoint verify RUN` says what is wrong with each; restore one "
                                       "from a copy, or start again under another run.id")
        return None

    def _candidates(self) -> list[tuple[str, str]]:
        """(name, problem seen without reading its files), newest first, as rank 0 sees them."""
        infos = reversed(list_checkpoints(self._store)) if self._rank == 0 else ()
        return self._gathered([(info.name, info.problem) for info in infos])[0]

    def _damage(self, folder: Store, manifest: CheckpointManifest) -> str:
        """What is wrong with the files, "" for nothing. The ranks share the reading, and all get the same answer."""
        mine = damaged_files(folder, manifest.files[self._rank::self._world_size])
        return "; ".join(problem for part in self._gathered(mine) for problem in part)

    def _gathered(self, mine: Any) -> list[Any]:
        if not self._distributed:
            return [mine]
        parts: list[Any] = [None] * self._world_size
        dist.all_gather_object(parts, mine, group=self._group)
        return parts

    def _load(self, folder: Store, manifest: CheckpointManifest, state: dict[str, Any]) -> None:
        flat = flatten(state)
        missing, unknown = sorted(flat.keys() - manifest.tensors.keys()), sorted(manifest.tensors.keys() - flat.keys())
        shapes = [name for name in flat.keys() & manifest.tensors.keys()
                  if tuple(flat[name].shape) != manifest.tensors[name].shape]
        if missing or unknown or shapes:
            told = [f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}" for what, names in (
                ("it lacks", missing), ("the model lacks", unknown), ("other shapes for", sorted(shapes))) if names]
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(told)}", where=folder.uri,
                                  mend="give the run the model configuration it was started with, or another run.id")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(flat, storage_reader=StoreReader(folder, manifest), process_group=self._group,
                     planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=not self._distributed)

    def close(self) -> None:
        """Finish the save under way and end the thread."""
        self._finish_pending()
        self._thread.shutdown(wait=True)


def flatten(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """{"model": {"a": t}} to {"model/a": t}; TypeError for anything but tensors."""
    flat: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, torch.Tensor):
            flat[f"{prefix}{name}"] = value
        else:
            raise TypeError(f"{prefix}{name} is {type(value).__name__}; checkpoints hold tensors, the rest is `extra`")
    return flat


def stage(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A flat copy of `state` in host memory that later steps cannot change; sharded tensors stay sharded."""
    return {name: _copy(tensor) for name, tensor in flatten(state).items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        # Not from_local, which would move the copy back to the mesh's own device.
        return DTensor(_copy(tensor.to_local()), tensor._spec, requires_grad=False)
    source = tensor.detach()
    return source.clone() if source.device.type == "cpu" else source.cpu()


def _with_retries(write: Callable[[], Any]) -> Any:
    """Try a write again while storage fails: up to ATTEMPTS times, with growing pauses."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type((StorageError, OSError)), reraise=True,
        stop=tenacity.stop_after_attempt(ATTEMPTS), wait=tenacity.wait_random_exponential(0.2, LONGEST_WAIT_SECONDS))
    return retrying(write)


def _reason(error: BaseException) -> str:
    """The first failure in torch's wrapper around what the ranks raised."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = next(iter(failures.items()))
        return f"rank {rank}: {wrapped[0]}"[:500]
    return str(error)[:500]
