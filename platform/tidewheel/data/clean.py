"""Removing from an output what nothing refers to: units and shards of earlier recipes, inputs and killed runs."""

from __future__ import annotations

from collections import Counter
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
"""What pipelines write units, shards and findings to. Other files of an output are not looked at."""
FINDINGS = ("verdicts", "annotations", "quarantine", NEAR_INDEX)
"""Folders that every run leaves tidy: there only files of units are looked at."""
_PARALLEL_READS = 16


@dataclass(frozen=True)
class Left:
    """Files of one folder that nothing refers to."""

    folder: str
    keys: tuple[str, ...]
    bytes: int

    def row(self) -> dict[str, str]:
        """For a table."""
        return {"folder": self.folder, "files": f"{len(self.keys):,}", "MB": f"{self.bytes / 1e6:,.1f}"}


def find(output: str, *, with_unfinished: bool = False) -> list[Left]:
    """Return what `clean` would remove, by folder. Writes nothing.

    Args:
        with_unfinished: also the work of a run that was not finished, which it would go on with.

    Raises:
        InputError: no pipeline has finished here, or one has begun since and was not finished.
        StorageError: what the output refers to is damaged.
    """
    place = store(output)
    units = replace.read_units(place)
    if not with_unfinished and place.exists(replace.UNFINISHED):
        begun = place.read_json(replace.UNFINISHED)
        which = f"{begun.get('name', 'a pipeline')} (recipe {begun.get('recipe_hash', '?')})"
        raise InputError(f"a run of {which} has begun here and not finished; its units would be removed",
                         where=place.uri, mend="finish it, or give --unfinished to remove its work as well")
    kept = _referred(place, units)
    left = []
    for folder in FOLDERS:
        gone = [file for file in place.list(folder) if file.key not in kept and not _is_tidy(folder, file.key)]
        if gone:
            left.append(Left(folder, tuple(file.key for file in gone), sum(file.bytes for file in gone)))
    return left


def clean(output: str, *, with_unfinished: bool = False) -> list[Left]:
    """Remove what nothing refers to, and return it; see `find`.

    Raises:
        OwnershipError: a pipeline is writing to this output.
    """
    place = store(output)
    with holding(place.child(LEASES), "pipeline", "a pipeline is writing to this output"):
        left = find(output, with_unfinished=with_unfinished)
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            list(pool.map(place.delete, [key for folder in left for key in folder.keys]))
        if with_unfinished:
            place.delete(replace.UNFINISHED)
    return left


def _referred(place: Store, units: Sequence[str]) -> set[str]:
    """Keys of the units' manifests and files, and of the files that the sets' manifests name."""
    with ThreadPoolExecutor(_PARALLEL_READS) as pool:
        kept = {key for keys in pool.map(lambda unit: _of_unit(place, unit), units) for key in keys}
    made = place.read_json(replace.SUMMARY)
    if "dataset" in made:
        kept |= {f"{product.FOLDER}/{key}" for key in product.keys(place.child(product.FOLDER))}
    for name in SETS if "rows" in made else ():  # what its recipe does not make is an earlier one's
        child = place.child(name)
        try:
            manifest = read_manifest(child)
        except ShardError as error:
            raise StorageError(f"the set is not whole, so nothing is removed ({error.what})", where=child.uri,
                               mend="run the pipeline again first") from None
        files = [KEY, manifest.tokenizer["file"], *(shard.name for shard in manifest.shards)]
        if manifest.waves:
            files += [GROWING, *(growing.wave_key(number) for number in range(len(manifest.waves)))]
        kept |= {f"{name}/{file}" for file in files}
    return kept


def _of_unit(place: Store, manifest: str) -> list[str]:
    try:
        unit = Published.from_json(place.read(manifest))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        raise StorageError("the unit's manifest is missing or damaged, so nothing is removed",
                           where=place.at(manifest), mend="run the pipeline again first") from None
    return [manifest, *(stamp.key for stamp in unit.files.values())]


def _is_tidy(folder: str, key: str) -> bool:
    """Whether a run writes this file itself, beside those of units."""
    return folder in FINDINGS and key.endswith("/summary.json" if folder == "verdicts" else ".json")


def totals(left: Sequence[Left]) -> tuple[int, int]:
    """Return (files, bytes)."""
    count: Counter[str] = Counter()
    for folder in left:
        count["files"] += len(folder.keys)
        count["bytes"] += folder.bytes
    return count["files"], count["bytes"]
