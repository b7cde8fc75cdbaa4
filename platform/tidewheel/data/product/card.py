"""`README.md` of a product: the data set card of the Hugging Face hub, whose header `load_dataset` reads.

Names from documents (sources, languages, licences) are escaped, so that they cannot become links, HTML or YAML.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tidewheel.data.config import UNDECISIVE, PipelineConfig
from tidewheel.data.product.formats import FOLDERS, SUFFIXES
from tidewheel.provenance import without_secrets

HUB_LICENSES = frozenset((
    "apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "cc", "cc0-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0",
    "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nd-4.0",
    "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cdla-sharing-1.0",
    "cdla-permissive-1.0", "cdla-permissive-2.0", "gpl", "gpl-2.0", "gpl-3.0", "lgpl", "lgpl-2.1", "lgpl-3.0",
    "agpl-3.0", "mpl-2.0", "epl-2.0", "isc", "zlib", "unlicense", "wtfpl", "artistic-2.0", "odc-by", "odbl", "pddl",
    "gfdl", "eupl-1.1", "eupl-1.2", "postgresql", "bsl-1.0", "unknown", "other"))
"""Names of licences that the hub knows; all others are "other"."""
_HUB_LANGUAGE = re.compile(r"[a-z]{2,3}")
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$:@-])")
_SHOWN_CHARACTERS = 80
_BUILDERS = ("parquet", "jsonl", "arrow")
"""Formats that `load_dataset` reads, best first."""


def recipe_of(config: PipelineConfig) -> dict[str, Any]:
    """Return the resolved recipe without settings that are not set or only say where it is computed."""
    values = {name: value for name, value in config.canonical().items() if name not in UNDECISIVE}
    steps = [{step.kind: _set(step.settings.canonical())} for step in config.steps]
    recipe: dict[str, Any] = without_secrets({**values, "read": _set(values["read"]), "steps": steps})
    return recipe


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _set(value) if isinstance(value, dict) else value for name, value in values.items()
            if value is not None}


def render(manifest: Mapping[str, Any]) -> str:
    """Return the card, a function of the manifest alone."""
    head = yaml.safe_dump(header(manifest), sort_keys=False, allow_unicode=True)
    recipe = yaml.safe_dump(manifest["recipe"], sort_keys=False, allow_unicode=True)
    splits = {name: count for name, count in manifest["splits"].items() if count}
    parts = [
        f"---\n{head}---\n\n# {_text(manifest['name'])}\n",
        f"{manifest['documents']:,} documents, {manifest['bytes'] / 1e6:,.1f} MB of text, written by Tidewheel with "
        f"the recipe `{manifest['recipe_hash']}`. The same input and recipe give the same bytes.\n",
        _table(("split", "documents"), [(name, f"{count:,}") for name, count in splits.items()]),
        _loading(manifest),
        "## Columns\n\n" + _table(("column", "what it holds"), [
            ("id", "stable name of the document"), ("text", "its text, cleaned"), ("source", "where it came from"),
            ("url, language, license", "as far as the input says them"),
            ("metadata", "JSON: the other fields of the record, and the file and offset it was read from")]),
        "## What was done\n\n" + _table(("stage", "in", "out", "dropped", "edited", "unusable"), [
            (stage["name"], f"{stage['documents_in']:,}", f"{stage['documents_out']:,}", _reasons(stage["dropped"]),
             f"{stage['edited']:,}", f"{stage['quarantined']:,}") for stage in manifest["stages"]]),
        _evaluation_sets(manifest["evaluation_sets"]),
        "## Languages\n\n" + _tally("language", manifest["languages"]),
        "## Licences\n\nAs the input says them, document by document; Tidewheel has not checked them.\n\n"
        + _tally("licence", manifest["licenses"]),
        "## Sources\n\n" + _tally("source", manifest["sources"]),
        "## Recipe\n\n" + "".join(f"    {line}\n" for line in recipe.splitlines()),
        "## Integrity\n\n`manifest.json` names every file with its length, BLAKE3 and SHA-256.\n"]
    return "\n".join(part for part in parts if part)


def header(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header, which the hub and `load_dataset` read."""
    languages = sorted({code for name in manifest["languages"] if (code := _language(name))})
    values: dict[str, Any] = {"pretty_name": manifest["name"], **({"language": languages} if languages else {}),
                              "license": _licenses(manifest["licenses"]), "task_categories": ["text-generation"],
                              "size_categories": [_size(manifest["documents"])]}
    if kind := next((name for name in _BUILDERS if name in manifest["formats"]), None):
        files = [{"split": split, "path": f"{FOLDERS[kind]}/{split}-*{SUFFIXES[kind]}"}
                 for split, count in manifest["splits"].items() if count]
        values["configs"] = [{"config_name": "default", "data_files": files}]
    return values


def _language(name: str) -> str:
    code = re.split(r"[-_]", name.lower())[0]
    return code if _HUB_LANGUAGE.fullmatch(code) else ""


def _licenses(counts: Mapping[str, Any]) -> str | list[str]:
    stated = sorted({name for name in counts if not name.startswith("(")})
    if not stated:
        return "unknown"
    names = sorted({hub if (hub := "-".join(name.lower().split())) in HUB_LICENSES else "other" for name in stated})
    return names[0] if len(names) == 1 else names


def _size(documents: int) -> str:
    steps = ((10**3, "1K"), (10**4, "10K"), (10**5, "100K"), (10**6, "1M"), (10**7, "10M"), (10**8, "100M"),
             (10**9, "1B"), (10**10, "10B"), (10**11, "100B"), (10**12, "1T"))
    before = ""
    for limit, name in steps:
        if documents < limit:
            return f"{before}<n<{name}" if before else f"n<{name}"
        before = name
    return "n>1T"


def _loading(manifest: Mapping[str, Any]) -> str:
    lines = []
    formats = manifest["formats"]
    if any(name in formats for name in _BUILDERS):
        lines.append("    # Hugging Face\n    datasets.load_dataset(FOLDER)")
    if "jsonl" in formats:
        lines.append("    # datatrove\n    JsonlReader(FOLDER + '/jsonl')")
    if "mds" in formats:
        lines.append("    # MosaicML streaming\n"
                     "    StreamingDataset(local=FOLDER + '/mds', split='train', batch_size=1)")
    if "megatron" in formats:
        lines.append("    # Megatron-LM, started in FOLDER\n    --data-path $(cat megatron/train.txt)")
    return "## Load it\n\n" + "\n".join(lines) + "\n"


def _evaluation_sets(sets: Sequence[Mapping[str, Any]]) -> str:
    if not sets:
        return ""
    rows = [(_text(entry["name"]), f"{entry['items']:,}") for entry in sets]
    return "## Evaluation sets it was searched for\n\n" + _table(("set", "items"), rows)


def _reasons(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{_text(reason)} {count:,}" for reason, count in sorted(dropped.items())) or "0"


def _tally(title: str, counts: Mapping[str, Sequence[int]]) -> str:
    rows = sorted(counts.items(), key=lambda item: (-item[1][0], item[0]))
    return _table((title, "documents", "MB of text"),
                  [(_text(name), f"{count:,}", f"{size / 1e6:,.2f}") for name, (count, size) in rows])


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _text(value: str) -> str:
    """Return text from a document or a recipe, escaped for Markdown."""
    value = " ".join("".join(mark if mark.isprintable() else " " for mark in value).split())
    value = value if len(value) <= _SHOWN_CHARACTERS else f"{value[: _SHOWN_CHARACTERS - 1]}\u2026"
    return _SPECIAL.sub(r"\\\1", html.escape(value))
