"""Load checkpoints into any number of ranks: the newest intact one of a run, or one given by its URI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tidewheel import storage
from tidewheel.checkpoint.folding import Folding
from tidewheel.checkpoint.manifest import KEY, CheckpointManifest
from tidewheel.checkpoint.peers import Peers, RankError
from tidewheel.checkpoint.reading import read_tensors
from tidewheel.checkpoint.shared_reading import Sharing, read_shared
from tidewheel.checkpoint.staging import dtype_name, without_absent
from tidewheel.checkpoint.verify import list_checkpoints, locate, of_step, parse_text, verify_files
from tidewheel.errors import CheckpointError, StorageError, TidewheelError
from tidewheel.ownership import CHECKPOINTS
from tidewheel.storage import Store
from tidewheel.train.runtime import Loaded


def load_newest(store: Store, peers: Peers, flat: dict[str, torch.Tensor], sharing: Sharing,
                on_refused: Callable[[str, str], None],
                usable: Callable[[Mapping[str, Any]], bool] | None = None) -> dict[str, Any] | None:
    """Fill tensors in place from the newest intact checkpoint; all ranks call this together and load the same one.

    The ranks share the work of reading every file and comparing its hash. Several ranks may put bytes of a checkpoint
    into the tensors before that is known; a damaged one is then replaced by the next.

    Args:
        store: the run's `checkpoints` folder.
        peers: the ranks.
        flat: tensors by path, see `staging.flatten`.
        sharing: how ranks share reads.
        on_refused: called with the name of each damaged or partial checkpoint that is skipped, and the reason.
        usable: called with the `extra` of a checkpoint, which is passed by if it returns False; None: all are.

    Returns:
        the checkpoint's `extra`; None when nothing was ever committed, or when no checkpoint is left that is neither
        suspect nor refused by `usable`.

    Raises:
        CheckpointError: there are committed checkpoints but none is intact, or the state does not fit.
        StorageError: the store does not answer.
    """
    listed = peers.from_first(lambda: [(info.name, info.committed and not info.suspect, info.problem)
                                       for info in reversed(list_checkpoints(store))])
    refused, passed_by = [], False
    for name, counts, problem in listed:
        manifest = None if problem else _manifest(store, peers, name)
        if manifest is not None and usable is not None and not usable(manifest.extra):
            passed_by = True
            continue
        problems = [problem] if manifest is None else _load(store, peers, name, manifest, flat, sharing)
        if manifest is not None and not problems:
            return manifest.extra
        reason = "; ".join(problems)
        on_refused(name, reason)
        if counts:
            refused.append(f"{name} ({reason})")
    if refused and not passed_by:
        raise CheckpointError(f"none of {len(refused)} checkpoints is intact: {', '.join(refused)[:500]}",
                              where=store.uri, fix="restore one from a copy, or delete them all to begin "
                              "the run anew")
    return None


def load_uri(uri: str, peers: Peers, flat: dict[str, torch.Tensor], sharing: Sharing, head: str = "") -> Loaded:
    """Fill tensors in place from a checkpoint of another run, converted to their dtypes; all ranks call this together.

    The checkpoint may hold more tensors than `flat`.

    Args:
        uri: a run (its newest complete checkpoint) or RUN/checkpoints/step_00000100.
        peers: the ranks.
        flat: tensors by path, see `staging.flatten`.
        sharing: how ranks share reads.
        head: path of an objective's head, which stays as it is if the checkpoint is of a decoder; "": a decoder is
            expected.

    Returns:
        which checkpoint it was, with `CheckpointManifest.model_hash`.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit.
        StorageError: the store does not answer.
    """
    folder, name = peers.from_first(lambda: _folder_and_name(uri))
    store = storage.store(folder)
    manifest = _manifest(store, peers, name)
    if not head:
        _same_head(manifest, flat, f"{folder}/{name}")
    elif _head_of(manifest) is None:
        flat = {path: tensor for path, tensor in flat.items() if path != head}
    problems = _load(store, peers, name, manifest, flat, sharing, convert=True)
    if problems:
        raise CheckpointError("; ".join(problems)[:500], where=f"{folder}/{name}",
                              fix="start from another checkpoint; `tidewheel checkpoint verify RUN` shows which "
                              "are intact")
    return Loaded(f"{folder}/{name}", manifest.model_hash)


def load_step(uri: str, step: int, peers: Peers, flat: dict[str, torch.Tensor], sharing: Sharing) -> dict[str, Any]:
    """Fill tensors in place from the checkpoint of one step of another run; all ranks call this together.

    Args:
        uri: the other run.
        step: of the checkpoint.
        peers: the ranks.
        flat: tensors by path, see `staging.flatten`; the checkpoint has the same, in the same dtypes.
        sharing: how ranks share reads.

    Returns:
        the checkpoint's `extra`.

    Raises:
        CheckpointError: the run has no intact checkpoint of this step, or it does not fit.
        StorageError: the store does not answer.
    """
    store = storage.store(uri).child(CHECKPOINTS)
    name = peers.from_first(lambda: of_step(store, step))
    manifest = _manifest(store, peers, name)
    problems = _load(store, peers, name, manifest, flat, sharing)
    if problems:
        raise CheckpointError("; ".join(problems)[:500], where=store.at(name),
                              fix="branch from another step; `tidewheel checkpoint verify RUN` shows which are intact")
    return manifest.extra


def reason_of(error: BaseException) -> str:
    """Return one line about `error`."""
    if isinstance(error, RankError):
        return f"rank {error.rank}: {reason_of(error.error)}"
    what = f"{error.where}: {error.what}" if isinstance(error, TidewheelError) else str(error)
    return what.splitlines()[0][:300] if what else type(error).__name__


def _same_head(manifest: CheckpointManifest, flat: dict[str, torch.Tensor], where: str) -> None:
    """Raise CheckpointError if a checkpoint has a head in the place of logits, and the tensors to fill do not."""
    head = _head_of(manifest)
    output = flat.get("model/output.weight")
    if head and (output is None or tuple(output.shape) != manifest.tensors["model/output.weight"].shape):
        raise CheckpointError(f"a model of objective {head}, whose head gives no logits; a decoder is expected",
                              where=where, fix="give a checkpoint of a decoder, such as the one that this model's own "
                              "training started from (model.init_from in its run.json)")


def _head_of(manifest: CheckpointManifest) -> str | None:
    """Return the objective whose head a checkpoint has in the place of logits."""
    return (manifest.extra.get("identity") or {}).get("head")


def _folder_and_name(uri: str) -> tuple[str, str]:
    _, checkpoints, name = locate(uri)
    return checkpoints.uri, name


def _problems(store: Store, peers: Peers, name: str, manifest: CheckpointManifest) -> list[str]:
    """Return the problems of the checkpoint's files; the same on all ranks."""
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
    return problems


def _manifest(store: Store, peers: Peers, name: str) -> CheckpointManifest:
    """Return the manifest of a checkpoint; one rank reads it, because object stores throttle many requests for one."""
    return parse_text(store, name, peers.from_first(lambda: store.read(f"{name}/{KEY}").decode()))


def _load(store: Store, peers: Peers, name: str, manifest: CheckpointManifest, flat: dict[str, torch.Tensor],
          sharing: Sharing, *, convert: bool = False) -> list[str]:
    """Fill tensors in place; return the problems of the checkpoint's files, the same on all ranks.

    One process alone reads every file twice: it compares the hash before any of it is used.
    """
    where = store.at(name)
    folding = Folding(without_absent(flat, manifest.tensors), manifest.tensors)
    flat = folding.tensors
    unfit = [line for lines in peers.all(misfits(manifest, flat, convert)) for line in lines]
    if not unfit and not peers.alone and sharing.scope != "off":
        shared = read_shared(store, name, manifest, flat, peers, sharing)
        if shared is not None:
            if not shared:
                folding.add_up()
            return shared
    problems = _problems(store, peers, name, manifest)
    if problems:
        return problems
    if unfit:
        raise CheckpointError("; ".join(dict.fromkeys(unfit))[:500], where=where,
                              fix="give the model the shape it has in the checkpoint" if convert else
                              "continue with the model and precision the run was started with")
    outcome: Exception | None = None
    try:
        read_tensors(store, name, manifest, flat)
    except Exception as error:  # the other ranks wait for it
        outcome = error
    try:
        peers.to_first(outcome)
    except RankError as error:
        raise CheckpointError(f"cannot be read: {reason_of(error)}", where=where,
                              fix="start again; the checkpoint was intact when it was verified") from error
    folding.add_up()
    return []


def misfits(manifest: CheckpointManifest, flat: Mapping[str, torch.Tensor], convert: bool = False) -> list[str]:
    """Return a line for each tensor that the checkpoint lacks or has in another shape or dtype.

    Args:
        manifest: of the checkpoint.
        flat: tensors by path, see `staging.flatten`.
        convert: whether another dtype fits.
    """
    lines = []
    for name, tensor in flat.items():
        entry = manifest.tensors.get(name)
        if entry is None:
            lines.append(f"{name} is not in the checkpoint")
        elif entry.shape != tuple(tensor.shape) or not (convert or entry.dtype == dtype_name(tensor)):
            lines.append(f"{name} is {entry.dtype} {list(entry.shape)} in the checkpoint, "
                         f"{dtype_name(tensor)} {list(tensor.shape)} in the run")
    return lines
