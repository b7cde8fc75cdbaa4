"""How a pipeline's output was made: its resolved recipe, versions and inputs, from summary.json."""

from __future__ import annotations

from typing import Any

import yaml

from tidewheel.report.page import Html, columns, details, table, tag

NOTE = "All settings, defaults included. recipe.json has the same, and inputs.jsonl every input file with its content."


def section(made: dict[str, Any]) -> list[Html]:
    """Return the blocks of the section from `made` of summary.json; [] if an earlier version recorded nothing."""
    if not made:
        return []
    recipe = yaml.safe_dump(_set_only(made.get("recipe", {})), sort_keys=False, allow_unicode=True, width=110)
    given, commit = made.get("input", {}), made.get("commit") or "not a git checkout"
    shown = commit[:12] + commit[40:] if len(commit) >= 40 else commit
    inputs = [("folder", given.get("uri", "\u2013")), ("files", f"{given.get('files', 0):,}"),
              ("MB", f"{given.get('bytes', 0) / 1e6:,.1f}"), ("hash of the list", str(given.get("hash", ""))[:23])]
    inputs += [(name, str(value)[:23]) for name, value in made.get("read_besides", {}).items()]
    versions = [*made.get("versions", {}).items(), ("commit", shown)]
    return [details("Recipe, all settings", tag("pre", recipe), open_=False),
            columns(tag("div", tag("h3", "Inputs"), table(("what", "value"), inputs)),
                    tag("div", tag("h3", "Versions"), table(("package", "version"), versions)))]


def _set_only(value: Any) -> Any:
    """Return JSON values without nulls, which are the kinds that a step is not."""
    if isinstance(value, dict):
        return {name: _set_only(inner) for name, inner in value.items() if inner is not None}
    return [_set_only(inner) for inner in value] if isinstance(value, list | tuple) else value
