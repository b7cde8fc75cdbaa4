"""Read the table of a tool's settings: a YAML file beside the module that computes what follows from several."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidewheel import yaml_text
from tidewheel.imports.optimizer_names import optimizer
from tidewheel.imports.table import Convert, Entry, Mapped, Meaningless, Missing, Source, Table

_GROUP = re.compile(r"(\S*)\{([^{}]*)\}")
_CONVERSIONS: dict[str, Convert] = {
    "float": float, "int": int, "optimizer": optimizer, "ignored": lambda given: None,
    "or_none": lambda given: given or None}
"""What `convert` may name in every table."""


def read_table(tool: str, joint: Callable[[Source], dict[str, Any]],
               conversions: Mapping[str, Mapping[Any, Any] | Convert]) -> Table:
    """Return the table in TOOL.yaml.

    `entries` is a list. An entry with `key` is `Mapped`: `to`, `convert`, `note` and `joint` are its arguments. One
    with `keys` is `Meaningless` or `Missing`, by which of the two words has the reason; `harmless` is an argument of
    `Missing`. In `keys`, `a.{b c}` stands for `a.b a.c`.

    Args:
        tool: its name on the command line.
        joint: our settings that follow from several of its keys, by dotted name.
        conversions: functions and mappings that `convert` names in this table.
    """
    # `load_all` parses in C, in a tenth of the time
    values = yaml_text.load_all(Path(__file__).with_name(f"{tool}.yaml").read_text(encoding="utf-8"))[0]
    entries = tuple(_entry(row, {**_CONVERSIONS, **conversions}) for row in values["entries"])
    return Table(tool, values["title"], values["source"], entries, joint, tuple(values["formats"]),
                 tuple(values.get("notes", ())))


def _entry(row: dict[str, Any], conversions: Mapping[str, Mapping[Any, Any] | Convert]) -> Entry:
    if "key" in row:
        convert = row.get("convert")
        return Mapped(**{**row, "convert": conversions[convert] if isinstance(convert, str) else convert})
    keys = _GROUP.sub(_below, row["keys"])
    if "meaningless" in row:
        return Meaningless(row["meaningless"], keys)
    return Missing(row["missing"], keys, **({"harmless": tuple(row["harmless"])} if "harmless" in row else {}))


def _below(group: re.Match[str]) -> str:
    return " ".join(f"{group[1]}{name}" for name in group[2].split())
