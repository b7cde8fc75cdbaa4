"""`tidewheel data clean` and `tidewheel data diff`: outputs of pipelines."""

from __future__ import annotations

import json
from typing import Annotated, Any

from cyclopts import Parameter

from tidewheel.commands.options import AsJson, DryRun
from tidewheel.console import print_table
from tidewheel.printable import printable


def clean(
    output: Annotated[str, Parameter(help="Folder or s3://bucket/prefix of a pipeline's output.")],
    *,
    unfinished: Annotated[bool, Parameter(negative="", help="Also remove the work of an unfinished run, which that "
                                                            "run would reuse.")] = False,
    dry_run: DryRun = False,
) -> int:
    """Remove unreferenced units and shards: those of earlier recipes and inputs, and of killed runs."""
    from tidewheel.data import clean as cleaning

    left = cleaning.find(output, with_unfinished=unfinished) if dry_run else cleaning.clean(
        output, with_unfinished=unfinished)
    files, size = cleaning.totals(left)
    if left:
        print_table([folder.row() for folder in left], title="what would be removed" if dry_run else "what is removed")
    print(f"{output}: {files:,} files, {size / 1e6:,.1f} MB {'would be removed' if dry_run else 'removed'}")
    return 0


def diff(
    a: Annotated[str, Parameter(help="Output of a pipeline (its --output).")],
    b: Annotated[str, Parameter(help="Output of another pipeline, or of the same one at another time.")],
    *,
    as_json: AsJson = False,
) -> int:
    """Compare two outputs: settings, versions, inputs, counts, and documents that only one has."""
    from tidewheel.data.diff import compare

    difference = compare(a, b)
    if as_json:
        print(json.dumps(difference.canonical(), indent=2))
        return 0
    if difference.settings:
        print_table([{"setting": name, "a": _shown(before), "b": _shown(now)}
                     for name, before, now in difference.settings], title="settings that differ")
    else:
        print("settings: the same")
    if difference.versions:
        print_table([{"package": name, "a": _shown(before), "b": _shown(now)}
                     for name, before, now in difference.versions], title="versions that differ")
    print("input files: " + ", ".join(f"{count:,} {what}" for what, count in difference.inputs.items()))
    print_table([{"count": row["count"], "a": _figure(row["a"]), "b": _figure(row["b"]),
                  "difference": _figure((row["b"] or 0) - (row["a"] or 0), signed=True)} for row in difference.counts],
                title="counts")
    print(f"documents in both: {difference.both:,}")
    for name, moved, other in (("gained", difference.gained, "a"), ("lost", difference.lost, "b")):
        print(f"documents {name}: {moved.count:,}" + (
            f", such as {printable(', '.join(moved.examples))}" if moved.count else ""))
        for reason, count in moved.reasons.most_common(20):
            print(f"  {count:,} in {other}: {printable(reason)}")
    return 0


def _shown(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def _figure(value: int | None, *, signed: bool = False) -> str:
    return "-" if value is None else f"{value:+,}" if signed and value else f"{value:,}"
