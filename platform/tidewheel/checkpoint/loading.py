"""Load checkpoints into any number of ranks: the newest intact one of a run, or one given by its URI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from tidewheel import storage
from tidewheel.checkpoint.dcp import Reader, load_planner
from tidewheel.checkpoint.manifest import KEY, CheckpointManifest
from tidewheel.checkpoint.peers import Peers
from tidewheel.checkpoint.staging import dtype_name
from tidewheel.checkpoint.verify import list_checkpoints, locate, parse_text, verify_files
from tidewheel.errors import CheckpointError, StorageError, TidewheelError
from tidewheel.storage import Store
from tidewheel.train.runtime import Loaded


def load_newest(store: Store, peers: Peers, flat: dict[str, torch.Tensor],
                on_refused: Callable[[str, str], None]) -> dict[str, Any] | None:
    """Fill tensors in place from the newest intact checkpoint; all ranks call this together and load the same one.

    The ranks share the work of reading every file and comparing its hash before any of it is used.

    Args:
        store: the run's `checkpoints` folder.
        peers: the ranks.
        flat: tensors by path, see `staging.flatten`.
        on_refused: called with the name of each damaged or partial checkpoint that is skipped, and the reason.

    Returns:
        the checkpoint's `extra`; None when nothing was ever committed, or only what is suspect now.

    Raises:
        CheckpointError: there are committed checkpoints but none is intact, or the state does not fit.
        StorageError: the store does not answer.
    """
    listed = peers.from_first(lambda: [(info.name, info.committed and not info.suspect, info.problem)
                                       for info in reversed(list_checkpoints(store))])
    refused = []
    for name, counts, problem in listed:
        manifest, problems = _inspect(store, peers, name) if not problem else (None, [problem])
        if manifest is not None and not problems:
            _load(store, peers, name, manifest, flat)
            return manifest.extra
        reason = "; ".join(problems)
        on_refused(name, reason)
        if counts:
            refused.append(f"{name} ({reason})")
    if refused:
        raise CheckpointError(f"none of {len(refused)} checkpoints is intact: {', '.join(refused)[:500]}",
                              where=store.uri, fix="restore one from a copy, or delete them all to begin "
                              "the run anew")
    return None


def load_uri(uri: str, peers: Peers, flat: dict[str, torch.Tensor]) -> Loaded:
    """Fill tensors in place from a checkpoint of another run, converted to their dtypes; all ranks call this together.

    The checkpoint may hold more tensors than `flat`.

    Args:
        uri: a run (its newest complete checkpoint) or RUN/checkpoints/step_00000100.
        peers: the ranks.
        flat: tensors by path, see `staging.flatten`.

    Returns:
        which checkpoint it was, with `CheckpointManifest.model_hash`.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit.
        StorageError: the store does not answer.
    """
    folder, name = peers.from_first(lambda: _folder_and_name(uri))
    store = storage.store(folder)
    manifest, problems = _inspect(store, peers, name)
    if problems:
        raise CheckpointError("; ".join(problems)[:500], where=f"{folder}/{name}",
                              fix="start from another checkpoint; `tidewheel checkpoint verify RUN` shows which "
                              "are intact")
    _same_head(manifest, flat, f"{folder}/{name}")
    _load(store, peers, name, manifest, flat, convert=True)
    return Loaded(f"{folder}/{name}", manifest.model_hash)


def reason_of(error: BaseException) -> str:
    """Return one line about `error`; when several ranks failed, about the lowest."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {reason_of(inner)}"
    what = f"{error.where}: {error.what}" if isinstance(error, TidewheelError) else str(error)
    return what.splitlines()[0][:300] if what else type(error).__name__


def _same_head(manifest: CheckpointManifest, flat: dict[str, torch.Tensor], where: str) -> None:
    """Raise CheckpointError if a checkpoint has a head in the place of logits, and the tensors to fill do not."""
    head = (manifest.extra.get("identity") or {}).get("head")
    output = flat.get("model/output.weight")
    if head and (output is None or tuple(output.shape) != manifest.tensors["model/output.weight"].shape):
        raise CheckpointError(f"a model of objective {head}, whose head gives no logits; a decoder is expected",
                              where=where, fix="give a checkpoint of a decoder, such as the one that this model's own "
                              "training started from (model.init_from in its run.json)")


def _folder_and_name(uri: str) -> tuple[str, str]:
    _, checkpoints, name = locate(uri)
    return checkpoints.uri, name


def _inspect(store: Store, peers: Peers, name: str) -> tuple[CheckpointManifest, list[str]]:
    """Return the manifest and the problems of the checkpoint's files; the same on all ranks."""
    # one rank reads the manifest, because object stores throttle a thousand requests for one object
    text = peers.from_first(lambda: store.read(f"{name}/{KEY}").decode())
    manifest = parse_text(store, name, text)
    own: list[str] | StorageError
    try:
        own = verify_files(store, name, manifest.files[peers.rank::peers.size])
    except StorageError as error:  # the other ranks wait for this rank's answer
        own = error
    problems: list[str] = []
    for result in peers.all(own):
        if isinstance(result, StorageError):
            raise result
        problems += result
    return manifest, problems


def _load(store: Store, peers: Peers, name: str, manifest: CheckpointManifest, flat: dict[str, torch.Tensor], *,
          convert: bool = False) -> None:
    where = store.at(name)
    misfits = [line for lines in peers.all(_misfits(manifest, flat, convert)) for line in lines]
    if misfits:
        raise CheckpointError("; ".join(dict.fromkeys(misfits))[:500], where=where,
                              fix="give the model the shape it has in the checkpoint" if convert else
                              "continue with the model and precision the run was started with")
    reader = Reader(store, name, manifest)
    try:
        torch_checkpoint.load(dict(flat), storage_reader=reader, planner=load_planner(),
                              process_group=peers.group, no_dist=peers.alone)
    except CheckpointException as error:
        raise CheckpointError(f"cannot be read: {reason_of(error)}", where=where,
                              fix="start again; the checkpoint was intact when it was verified") from error


def _misfits(manifest: CheckpointManifest, flat: dict[str, torch.Tensor], convert: bool) -> list[str]:
    """Return a line for each tensor that the checkpoint lacks or has in another shape or, unless `convert`, dtype."""
    lines = []
    for name, tensor in flat.items():
        entry = manifest.tensors.get(name)
        if entry is None:
            lines.append(f"{name} is not in the checkpoint")
        elif entry.shape != tuple(tensor.shape) or not (convert or entry.dtype == dtype_name(tensor)):
            lines.append(f"{name} is {entry.dtype} {list(entry.shape)} in the checkpoint, "
                         f"{dtype_name(tensor)} {list(tensor.shape)} in the run")
    return lines
