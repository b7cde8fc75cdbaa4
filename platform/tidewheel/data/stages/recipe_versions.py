"""Versions of all parts that a recipe uses, for the key of a workflow step."""

from __future__ import annotations

from collections.abc import Iterable

from tidewheel.data.config import PipelineConfig
from tidewheel.data.reader import reader_of, version_of
from tidewheel.data.readers import sniff
from tidewheel.data.readers.record import RECORDS
from tidewheel.data.stages import (
    decontaminate,
    dedup_exact,
    dedup_lines,
    dedup_near,
    dedup_url,
    filters,
    ingest,
    near_exact,
    pack,
    partition,
    row_local,
    tokenizer,
    write,
)
from tidewheel.versions import Version

_STEPS: dict[str, tuple[Version, ...]] = {
    "dedup_url": (dedup_url.VERSION,), "dedup_exact": (dedup_exact.VERSION,), "dedup_lines": (dedup_lines.VERSION,),
    "dedup_near": (dedup_near.VERSION, near_exact.VERSION), "decontaminate": (decontaminate.VERSION,),
    "tokenize": (tokenizer.VERSION,), "pack": (pack.VERSION,), "write": (write.VERSION,),
}


def of_steps(config: PipelineConfig) -> dict[str, int]:
    """Return the version of each part that the recipe's steps use, by the part's name."""
    used = [ingest.VERSION, partition.VERSION, RECORDS]
    for step in config.steps:
        if step.filter is not None:
            used += [row_local.VERSION, *filters.versions(step.filter.filters)]
        else:
            used += _STEPS[step.kind]
    product = config.product
    if product is not None:
        used.append(write.MEGATRON_VERSION if "megatron" in product.formats else write.VERSION)
    return Version("recipe", uses=tuple(used)).numbers()


def of_files(names: Iterable[str], config: PipelineConfig) -> dict[str, int | str]:
    """Return the versions of the readers of these files, by format.

    The file names give the formats. Readers of installed packages that may be chosen by content are there with the
    hash of their source.
    """
    kinds = {sniff.format_of_name(name, config.read) for name in names}
    versions = {kind: version_of(reader_of(kind, config.read)).number for kind in sorted(kinds) if kind}
    return {**versions, **sniff.installed_sources(config.read)}
