"""Remove unreferenced files from an output: units and shards of earlier recipes, earlier inputs and killed runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tidewheel.data import product
from tidewheel.data.pipeline import LEASES
from tidewheel.data.stage import Published
from tidewheel.data.stages import replace
from tidewheel.data.stages.near_index import FOLDER as NEAR_INDEX
from tidewheel.data.stages.pack import SETS
from tidewheel.errors import InputError, ShardError, StorageError
from tidewheel.lease import holding
from tidewheel.shards import growing
from tidewheel.shards.manifest import GROWING, KEY, read_manifest
from tidewheel.storage import Store, store

FOLDERS = ("stages", *SETS, product.FOLDER, "verdicts", "annotations", "quarantine", NEAR_INDEX)
"""Folders that pipelines write to. Other files of an output are ignored."""
FINDINGS = ("verdicts", "annotations", "quarantine", NEAR_INDEX)
"""Folders that every run tidies itself; of these, only files of units are considered."""
_PARALLEL_READS = 16


@dataclass(frozen=True)
class Left:
    """Unreferenced files of one folder."""

    folder: str
    keys: tuple[str, ...]
    bytes: int

    def row(self) -> dict[str, str]:
        """Return a table row."""
        return {"folder": self.folder, "files": f"{len(self.keys):,}", "MB": f"{self.bytes / 1e6:,.1f}"}


def find(output: str, *, with_unfinished: bool = False) -> list[Left]:
    """Return the files that `clean` would remove, by folder.

    Args:
        output: URI of the output.
        with_unfinished: also remove the work of an unfinished run, which that run could reuse.

    Raises:
        InputError: no pipeline has finished in the output, or a later run has not finished.
        StorageError: a manifest or set of the output is damaged.
    """
    folder_store = store(output)
    units = replace.read_units(folder_store)
    if not with_unfinished and folder_store.exists(replace.UNFINISHED):
        unfinished = folder_store.read_json(replace.UNFINISHED)
        which = f"{unfinished.get('name', 'a pipeline')} (recipe {unfinished.get('recipe_hash', '?')})"
        raise InputError(f"a run of {which} has begun here and not finished; its units would be removed",
                         where=folder_store.uri, fix="finish it, or give --unfinished to remove its work as well")
    kept = _referenced(folder_store, units)
    left = []
    for folder in FOLDERS:
        files = [file for file in folder_store.list(folder)
                 if file.key not in kept and not _is_summary(folder, file.key)]
        if files:
            left.append(Left(folder, tuple(file.key for file in files), sum(file.bytes for file in files)))
    return left


def clean(output: str, *, with_unfinished: bool = False) -> list[Left]:
    """Remove unreferenced files and return them; see `find`.

    Raises:
        OwnershipError: a pipeline is writing to this output.
        InputError: as `find`.
        StorageError: as `find`.
    """
    folder_store = store(output)
    with holding(folder_store.child(LEASES), "pipeline", "a pipeline is writing to this output"):
        left = find(output, with_unfinished=with_unfinished)
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            list(pool.map(folder_store.delete, [key for folder in left for key in folder.keys]))
        if with_unfinished:
            folder_store.delete(replace.UNFINISHED)
    return left


def _referenced(output: Store, units: Sequence[str]) -> set[str]:
    """Return the keys of the units' manifests and files, and of the files that the sets' manifests name."""
    with ThreadPoolExecutor(_PARALLEL_READS) as pool:
        kept = {key for keys in pool.map(lambda unit: _of_unit(output, unit), units) for key in keys}
    summary = output.read_json(replace.SUMMARY)
    if "dataset" in summary:
        kept |= {f"{product.FOLDER}/{key}" for key in product.keys(output.child(product.FOLDER))}
    for name in SETS if "rows" in summary else ():  # without rows, sets in the output belong to an earlier recipe
        child = output.child(name)
        try:
            manifest = read_manifest(child)
        except ShardError as error:
            raise StorageError(f"the set is incomplete, so nothing is removed ({error.what})", where=child.uri,
                               fix="run the pipeline again first") from None
        files = [KEY, manifest.tokenizer["file"], *(shard.name for shard in manifest.shards)]
        if manifest.waves:
            files += [GROWING, *(growing.wave_key(wave) for wave in range(len(manifest.waves)))]
        kept |= {f"{name}/{file}" for file in files}
    return kept


def _of_unit(output: Store, manifest: str) -> list[str]:
    try:
        unit = Published.from_json(output.read(manifest))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        raise StorageError("the unit's manifest is missing or damaged, so nothing is removed",
                           where=output.at(manifest), fix="run the pipeline again first") from None
    return [manifest, *(stamp.key for stamp in unit.files.values())]


def _is_summary(folder: str, key: str) -> bool:
    """Return whether a run writes and tidies this file itself, because it belongs to no unit."""
    return folder in FINDINGS and key.endswith("/summary.json" if folder == "verdicts" else ".json")


def totals(left: Sequence[Left]) -> tuple[int, int]:
    """Return (files, bytes) over all folders."""
    return sum(len(folder.keys) for folder in left), sum(folder.bytes for folder in left)
