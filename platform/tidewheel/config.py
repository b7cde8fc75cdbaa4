"""Typed configuration with one loader: YAML, then `--set key=value`, then validation, once.

Each package keeps its settings beside the code that uses them, as subclasses of `Config`. An unknown key is an error
that suggests the nearest known one.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml
from pydantic_core import InitErrorDetails, PydanticCustomError

from tidewheel import yaml_text
from tidewheel.errors import ConfigError

C = TypeVar("C", bound="Config")


class Config(pydantic.BaseModel):
    """Base of every configuration. It is immutable and rejects unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    def canonical(self) -> dict[str, Any]:
        """Return all settings, defaults included, as JSON values."""
        return self.model_dump(mode="json")

    def decisive(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as JSON values.

        Keys of finished work are hashes of these values, so a setting that a later release adds leaves old keys valid.
        A changed default needs a new version of its part.
        """
        dumped = self.canonical()
        values: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in dumped:  # excluded from dumps: it only records where other settings came from
                continue
            default = field.get_default(call_default_factory=True)
            if field.is_required() or value != default:
                values[name] = _decisive(value, dumped[name], default)
        return values

    def decisive_beside(self, default: object) -> dict[str, Any]:
        """Return `decisive` as seen from a field whose default value is `default`."""
        return self.decisive()

    def recipe_hash(self) -> str:
        """Return the hash of `decisive`. Equal recipes have equal hashes, however they are written."""
        return recipe_hash(self.decisive())


def _decisive(value: Any, dumped: Any, default: Any = None) -> Any:
    """Return `dumped`, the JSON form of `value`, with `decisive` in place of each configuration inside it."""
    if isinstance(value, Config):
        return value.decisive_beside(default)
    if isinstance(value, Mapping):
        return {name: _decisive(inner, dumped[name]) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_decisive(inner, shown) for inner, shown in zip(value, dumped, strict=True)]
    return dumped


def recipe_hash(value: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of `value` as canonical JSON (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


Setting = str | int | float | bool | None | Sequence["Setting"] | Mapping[str, "Setting"]
"""A YAML value: a scalar, a list, or settings by name."""


def load(cls: type[C], path: str | Path, overrides: Sequence[str] = (),
         settings: Mapping[str, Setting] | None = None) -> C:
    """Read a configuration file.

    Args:
        cls: type of the configuration.
        path: path or URI of a YAML file.
        overrides: overrides of the form "a.b=value", with a YAML value. They are applied last.
        settings: settings that replace those in the file; see `merged`.

    Raises:
        ConfigError: the file is missing, is not YAML, or a key or value in it is wrong.
    """
    from tidewheel import storage

    where = str(path)
    try:
        text = storage.read_text(where)
    except FileNotFoundError:
        raise ConfigError("no such configuration file", where=where,
                          fix="give the path of a YAML file; examples are in pipelines/ and jobs/configs/") from None
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", where=where, fix="save the file as UTF-8 YAML") from None
    try:
        values = yaml_text.load(text)
        values = {} if values is None else values
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{where}:{mark.line + 1}" if mark else where
        raise ConfigError(f"not valid YAML: {getattr(error, 'problem', None) or error}", where=line,
                          fix="check indentation and quotes at that line") from None
    if not isinstance(values, dict):
        raise ConfigError(f"expected keys and values, found {type(values).__name__}", where=where,
                          fix="start from one of the examples in pipelines/ or jobs/configs/")
    return build(cls, merged(cls, values, settings or {}), overrides, where=where)


def merged(cls: type[Config], values: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return `values` updated with `settings`, group by group.

    A group of another `kind` replaces the whole group in `values`, since one part's settings mean nothing to another.

    Args:
        cls: type of the configuration.
        values: settings of the file.
        settings: settings that replace those in `values`.
    """
    updated = dict(values)
    for name, setting in settings.items():
        default = _default_kind(cls, name)
        before = updated.get(name)
        if default is not None and isinstance(before, str):
            before = {"kind": before}
        if isinstance(setting, Mapping) and isinstance(before, Mapping) and (
                default is None or setting.get("kind", before.get("kind", default)) == before.get("kind", default)):
            updated[name] = _merged(before, setting)
        else:
            updated[name] = setting
    return updated


def _merged(values: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    updated = dict(values)
    for name, setting in settings.items():
        before = updated.get(name)
        both = isinstance(setting, Mapping) and isinstance(before, Mapping)
        updated[name] = _merged(before, setting) if both else setting  # type: ignore[arg-type]
    return updated


def _default_kind(cls: type[Config], name: str) -> str | None:
    """Return the default kind of a field that holds a part; None for any other field."""
    field = cls.model_fields.get(name)
    defaults = [getattr(annotation, "default", None) for annotation in (field.metadata if field else ())]
    return next((default for default in defaults if isinstance(default, str)), None)


def build(cls: type[C], values: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "settings") -> C:
    """Return the configuration with these values.

    Args:
        cls: type of the configuration.
        values: settings by name, as YAML has them.
        overrides: overrides of the form "a.b=value", with a YAML value.
        where: source of the values, for error messages.

    Raises:
        ConfigError: a key or value is wrong.
    """
    merged = json.loads(json.dumps(values, default=str))
    for override in overrides:
        _name_kinds(cls, merged)
        _apply(merged, override)
    try:
        return cls.model_validate(merged)
    except pydantic.ValidationError as error:
        raise ConfigError(explain(cls, error), where=where, fix="correct the keys named above") from None


def _name_kinds(cls: type[Config], values: dict[str, Any]) -> None:
    """Replace each part that is given by name alone by {"kind": name}, so that overrides can reach its settings."""
    for name, value in values.items():
        if isinstance(value, str) and _default_kind(cls, name) is not None:
            values[name] = {"kind": value}


def setting(text: str) -> tuple[str, Any]:
    """Return the key and the value of a command line's "key=value", whose value is YAML.

    Raises:
        ConfigError: it has another form.
    """
    key, sep, value = text.partition("=")
    key = key.strip()
    if not sep or not key:
        raise ConfigError(f"{text!r} is not of the form key=value", where="--set",
                          fix="write for example --set train.steps=100")
    try:
        return key, yaml_text.load(value)
    except yaml.YAMLError:
        raise ConfigError(f"the value in {text!r} is not valid YAML", where="--set", fix="quote the value") from None


def _apply(values: dict[str, Any], override: str) -> None:
    key, value = setting(override)
    *parents, last = key.split(".")
    node: Any = values
    for depth, part in enumerate(parents):
        node = _step_into(node, part, ".".join(parents[: depth + 1]))
    if isinstance(node, list):
        node[_index(node, last, key)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"{key!r}: {'.'.join(parents)!r} is a plain value, it has no keys", where="--set",
                          fix="set the value itself, or a key of a group")


def _step_into(node: Any, part: str, path: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, path)]
    if isinstance(node, dict):
        if node.get(part) is None:
            node[part] = {}
        return node[part]
    raise ConfigError(f"{path!r} does not lead to a group of settings", where="--set", fix="check the key")


def _index(node: list[Any], part: str, path: str) -> int:
    if not node:
        raise ConfigError(f"{path!r} is inside an empty list", where="--set", fix="set the whole list")
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"{path!r}: a list of {len(node)} needs an index from 0 to {len(node) - 1}", where="--set",
                          fix="count from 0")
    return int(part)


def unknown_key(key: str, known: Iterable[str], value: Any) -> pydantic.ValidationError:
    """Return the error about an unknown key, with the nearest known one, for groups that pydantic does not check.

    Args:
        key: the unknown key.
        known: keys that exist.
        value: value of the unknown key.
    """
    return below(key, [{"type": _unknown(_hint(key, known)), "loc": (), "input": value}])


def below(key: str, problems: Sequence[InitErrorDetails]) -> pydantic.ValidationError:
    """Return the error about problems in the group `key`; their paths are relative to the group."""
    return pydantic.ValidationError.from_exception_data("settings", [
        {**problem, "loc": (key, *problem.get("loc", ()))} for problem in problems])


def problems_of(cls: type[Config], error: pydantic.ValidationError) -> list[InitErrorDetails]:
    """Return the problems of an error about `cls`, to raise in another one, with the nearest key for unknown ones."""
    problems: list[InitErrorDetails] = []
    for problem in error.errors(include_url=False):
        loc, context = problem["loc"], problem.get("ctx", {})
        if problem["type"] == "extra_forbidden":
            kind = _unknown(_hint(str(loc[-1]), _known_keys(cls, loc[:-1])))
        elif problem["type"] == "unknown_key":
            kind = _unknown(context["hint"])
        else:
            kind = PydanticCustomError("setting", "{message}", {"message": problem["msg"]})
        problems.append({"type": kind, "loc": loc, "input": problem.get("input")})
    return problems


def _unknown(hint: str) -> PydanticCustomError:
    return PydanticCustomError("unknown_key", "unknown key{hint}", {"hint": hint})


def _hint(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(names) or 'none'}"


def explain(cls: type[Config], error: pydantic.ValidationError) -> str:
    """Return the problems of an error about `cls`, each with its dotted key, separated by semicolons."""
    lines = []
    for problem in error.errors(include_url=False):
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {path!r}{_hint(str(problem['loc'][-1]), _known_keys(cls, problem['loc'][:-1]))}")
        elif problem["type"] == "unknown_key":
            lines.append(f"unknown key {path!r}{problem['ctx']['hint']}")
        else:
            given = problem.get("input")
            shown = "" if isinstance(given, dict | list) else f" (got {given!r})"
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{path}: {message}{shown}" if path else f"{message}")
    return "; ".join(lines)


def _known_keys(cls: type[Config], loc: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the group at `loc`, through nested Config classes, lists, unions and dicts."""
    groups: list[type[Config]] = [cls]
    for part in loc:
        inner: list[type[Config]] = []
        for group in groups:
            if str(part) in group.model_fields:
                inner += _configs_in(group.model_fields[str(part)].annotation)
        # list indices and union tags name no field: stay in this group
        groups = inner or groups
    return sorted({name for group in groups for name in group.model_fields})


def _configs_in(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [config for argument in typing.get_args(annotation) for config in _configs_in(argument)]
