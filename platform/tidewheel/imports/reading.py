"""Read another tool's file into its settings by dotted key: JSON, YAML, TOML or command-line arguments."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tidewheel import yaml_text
from tidewheel.errors import ConfigError
from tidewheel.imports.table import Table


def read(table: Table, file: str) -> dict[str, Any]:
    """Return the value of each dotted key in a file.

    Raises:
        ConfigError: the file is missing or is not in the tool's format, or the tool has no such key.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("no such file", where=file, fix=f"give the {table.title} file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=file, fix="give a UTF-8 text file") from None
    return parse(table, text, file)


def parse(table: Table, text: str, where: str) -> dict[str, Any]:
    """Return the value of each dotted key of a file's text.

    Args:
        table: of the tool.
        text: content of the file.
        where: its name, whose ending chooses among the tool's formats.

    Raises:
        ConfigError: the text is not in the tool's format, or the tool has no such key.
    """
    parsers: dict[str, Callable[[str], Any]] = {
        "json": _json, "yaml": yaml_text.load, "toml": tomllib.loads, "arguments": arguments}
    by_suffix = Path(where).suffix.lower().lstrip(".").replace("yml", "yaml")
    form = by_suffix if by_suffix in table.formats else table.formats[0]
    try:
        values = parsers[form](text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"not valid {form}: {error}", where=where,
                          fix=f"give the {table.title} file: {' or '.join(table.formats)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"expected keys and values, found {type(values).__name__}", where=where,
                          fix=f"give the {table.title} file")
    flat: dict[str, Any] = {}
    _flatten(table, values, "", flat)
    for key in flat:
        table.find(key)
    return flat


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_repetition)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r} occurs twice")
        values[key] = value
    return values


def _flatten(table: Table, values: Mapping[str, Any], prefix: str, flat: dict[str, Any]) -> None:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not table.is_leaf(key):
            _flatten(table, value, f"{key}.", flat)
        elif value in (None, {}) and table.is_group(key) and key not in table.by_key:
            continue  # an empty group sets nothing
        else:
            flat[key] = value


def arguments(text: str) -> dict[str, Any]:
    """Return the value of each `--name` of a shell line, or of a file with one argument or several on each line.

    What starts the program is skipped: everything up to the first word that ends in .py, or else up to the first
    `--name`. A name without a value is True, one with several values a
    list. A backslash at the end of a line and comments are as in a shell.

    Raises:
        ValueError: a name occurs twice, or a quote is not closed.
    """
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    program = next((index for index, word in enumerate(words) if word.endswith(".py")), -1)
    rest = words[program + 1:]
    first = next((index for index, word in enumerate(rest) if _is_name(word)), len(rest))
    values: dict[str, Any] = {}
    name = ""
    for word in rest[first:]:
        if _is_name(word):
            name, equals, value = word.removeprefix("--").partition("=")
            if name in values:
                raise ValueError(f"--{name} occurs twice")
            values[name] = _scalar(value) if equals else True
        elif values[name] is True:
            values[name] = _scalar(word)
        else:
            before = values[name] if isinstance(values[name], list) else [values[name]]
            values[name] = [*before, _scalar(word)]
    return values


def _is_name(word: str) -> bool:
    return re.match(r"--[A-Za-z]", word) is not None


def _scalar(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)
