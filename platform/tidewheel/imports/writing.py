"""Write an imported configuration as YAML with comments, and the tables of keys of the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from tidewheel.imports.convert import Imported
from tidewheel.imports.table import Table

_GROUP_ORDER = ("kind", "preset")
"""Settings that come first in their group."""


def as_yaml(imported: Imported, file: str) -> str:
    """Return the configuration as YAML; every value names the keys that it comes from.

    Args:
        imported: the converted file.
        file: its name, for the head.
    """
    lines = [f"# From {imported.table.title}: {file}"]
    for row in imported.lost:
        lines.append(f"# not available: {row.key}: {_shown(row.given)} ({row.note})")
    lines += _lines(imported, imported.settings, "", 0)
    return "\n".join(lines) + "\n"


def _lines(imported: Imported, values: Mapping[str, Any], prefix: str, depth: int) -> list[str]:
    lines = []
    first = [name for name in _GROUP_ORDER if name in values]
    for name in [*first, *(name for name in values if name not in first)]:
        value, dotted = values[name], f"{prefix}{name}"
        indent = "  " * depth
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{name}:")
            lines += _lines(imported, value, f"{dotted}.", depth + 1)
            continue
        comment = ", ".join(f"{row.key}: {_shown(row.given)}" for row in imported.origins.get(dotted, ())
                            if row.verdict == "mapped")
        lines.append(f"{indent}{name}: {_scalar(value)}" + (f"  # {comment}" if comment else ""))
    return lines


def _scalar(value: Any) -> str:
    """Return a value on one line, as YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def markdown(table: Table) -> str:
    """Return the table of all keys of a tool, for the documentation."""
    lines = [f"## {table.title}", "", f"Settings as documented in {table.source}."]
    lines += ["", *table.notes] if table.notes else []
    lines += ["", "| key | here | how, or why not |", "|---|---|---|"]
    for keys, here, note in table.rows():
        names = ", ".join("<code>" + key.replace("*", "\\*") + "</code>" for key in keys)
        lines.append(f"| {names} | {here} | {_cell(note)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
