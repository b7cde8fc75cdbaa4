"""Print the keys of all tools as Markdown: `python -m tidewheel.imports > docs/coming_from_keys.md`."""

from __future__ import annotations

import sys

from tidewheel.imports import TABLES
from tidewheel.imports.table import Mapped, Meaningless, keys_of
from tidewheel.imports.writing import markdown

HEAD = """# Keys of other tools

`python -m tidewheel.imports > docs/coming_from_keys.md` writes this page from the tables in
`platform/tidewheel/imports/`, and a test compares the two.
[Coming from another tool](coming_from.md) shows how to convert a file.
"""


def page() -> str:
    """Return the whole page."""
    lines = ["", "| tool | keys | mapped | no meaning here | not available |", "|---|---|---|---|---|"]
    for table in TABLES.values():
        counts = dict.fromkeys(("mapped", "meaningless", "missing"), 0)
        for entry in table.entries:
            kind = "mapped" if isinstance(entry, Mapped) else "meaningless" if isinstance(entry, Meaningless) else (
                "missing")
            counts[kind] += len(keys_of(entry))
        lines.append(f"| {table.title} | {len(table.by_key)} | " + " | ".join(map(str, counts.values())) + " |")
    return HEAD + "\n".join(lines) + "\n\n" + "\n".join(markdown(table) for table in TABLES.values())


if __name__ == "__main__":
    sys.stdout.write(page())
