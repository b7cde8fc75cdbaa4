"""Errors for empty results; each message says what happened to the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.data import quarantine
from tidewheel.data.stage import Published, counts
from tidewheel.data.stages.job import Job
from tidewheel.errors import InputError

EMPTY = "empty_file"
SHOWN = 3


def only_empty_files(units: Sequence[Published], job: Job) -> InputError | None:
    """Return the error for an input whose files are all empty; None if a record was read."""
    if set(counts(units, "quarantined")) != {EMPTY} or sum(unit.summary["documents"] for unit in units):
        return None
    if any(unit.summary["records"] > unit.summary["bad"] for unit in units):
        return None
    files = len(job.files)
    return InputError(f"nothing was read: {'the only file is' if files == 1 else f'all {files} files are'} empty",
                      where=job.input, fix="correct --input or read.paths; --dry-run shows the first record of each "
                      "format")


def nothing_left(stages: Sequence[Mapping[str, Any]], reasons: Mapping[str, int], job: Job) -> InputError:
    """Return the error for a recipe that leaves no document.

    Args:
        stages: counts of the stages so far, as in the summary.
        reasons: number of quarantined records by reason.
        job: what the stages work on.
    """
    read = stages[0]["documents_in"]
    bad = sum(reasons.values())
    parts = [f"{read:,} record{'s' * (read != 1)} read"]
    if bad:
        parts.append(f"{bad:,} cannot be used ({_by_count(reasons)})")
    parts += [f"{entry['name']} dropped {sum(entry['dropped'].values()):,} ({_by_count(entry['dropped'])})"
              for entry in stages if entry["dropped"]]
    most = max(stages, key=lambda entry: sum(entry["dropped"].values()))
    dropped = sum(most["dropped"].values())
    if not read and job.config.read.sample is not None:
        fix = f"raise read.sample ({job.config.read.sample:g}): no document is in it"
    elif not read:
        fix = "correct --input or read.paths"
    elif bad >= dropped:
        first = max(reasons, key=lambda reason: reasons[reason])
        fix = (f"correct the files or read.text and read.id: {quarantine.REASONS[first]}; {job.output}/quarantine "
               "names each record")
    else:
        fix = (f"loosen {most['name']}, which drops most, or give other documents; "
               f"{job.output}/verdicts/{most['name']} has each one's reason")
    return InputError(f"no document is left: {'; '.join(parts)}", where=job.input, fix=fix)


def no_training_row(packed: Sequence[Published], job: Job) -> InputError | None:
    """Return the error for a training set without a row; None if it has one."""
    if any(unit.summary.get("shards", {}).get("shards") for unit in packed):
        return None
    held_out = sum(unit.summary["validation"]["documents"] for unit in packed if "validation" in unit.summary)
    share = job.config.step("pack").validation_fraction
    return InputError(f"the training set has no row: all {held_out:,} documents went to the validation set, which "
                      f"takes {share:g} of them", where=job.input,
                      fix="lower pack.validation_fraction (0 for none), or give more documents")


def _by_count(reasons: Mapping[str, int]) -> str:
    """Return the most frequent reasons with their counts."""
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{reason} {count:,}" for reason, count in ordered[:SHOWN]]
    return ", ".join([*shown, *([f"{len(ordered) - SHOWN} other reasons"] if len(ordered) > SHOWN else [])])
