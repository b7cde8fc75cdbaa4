"""Convert another tool's settings to a training configuration, with an account of every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel.config import build, setting
from tidewheel.errors import ConfigError
from tidewheel.imports.table import AUTO, Mapped, Meaningless, Source, Table, Unavailable
from tidewheel.models import families
from tidewheel.train import objectives, optimizers, schedules
from tidewheel.train.config import TrainConfig

PARTS = {"model": families, "optimizer": optimizers, "schedule": schedules, "objective": objectives}
"""Groups that hold a part, whose settings follow from its kind."""


@dataclass(frozen=True)
class Row:
    """What became of one key.

    Args:
        key: the key, dotted.
        given: its value.
        verdict: mapped, default (our default is meant), no meaning here, or not available.
        here: our settings with their values.
        note: how, or why not.
    """

    key: str
    given: Any
    verdict: str
    here: str = ""
    note: str = ""


@dataclass(frozen=True)
class Imported:
    """A converted file.

    Args:
        table: of the tool.
        settings: our settings, in groups.
        rows: an account of every key.
        origins: {our dotted setting: the keys that it comes from}.
    """

    table: Table
    settings: dict[str, Any]
    rows: list[Row]
    origins: dict[str, list[Row]]

    @property
    def lost(self) -> list[Row]:
        """Return the keys that would change the run and have no counterpart."""
        return [row for row in self.rows if row.verdict == "not available"]


def convert(table: Table, values: Mapping[str, Any], *, gpus: int | None = None,
            overrides: Sequence[str] = ()) -> Imported:
    """Return the training configuration that the settings of another tool mean.

    Args:
        table: of the tool.
        values: its settings by dotted key.
        gpus: number of GPUs of the run; they become elastic.max_workers.
        overrides: settings of ours, "a.b=value", which replace the converted ones.

    Raises:
        ConfigError: the result is no valid configuration, such as a batch that does not divide.
    """
    source = Source(values, gpus)
    settings = {name: value for name, value in table.joint(source).items() if value is not None}
    rows: list[Row] = []
    mapped: dict[str, tuple[str, ...]] = {}
    for key, given in values.items():
        entry = table.find(key)
        if given == AUTO:
            rows.append(Row(key, given, "default", note="auto: our default, or it follows from the others"))
        elif isinstance(entry, Meaningless):
            rows.append(Row(key, given, "no meaning here", note=entry.reason))
        elif not isinstance(entry, Mapped):
            lost = not _is_one_of(given, entry.harmless)
            rows.append(Row(key, given, "not available" if lost else "default", note=entry.reason if lost else "off"))
        else:
            try:
                value = None if given is None else entry.value(given)
            except Unavailable as unavailable:
                rows.append(Row(key, given, "not available", note=str(unavailable)))
                continue
            mapped[key] = tuple(entry.to.split())
            if not entry.joint and value is not None:
                settings.update(dict.fromkeys(mapped[key], value))
    _put_gpus(settings, gpus)
    for override in overrides:
        name, value = setting(override)
        settings[name] = value
    refused = _without_unknown(settings)
    rows += [_row(table, key, values[key], names, settings, refused) for key, names in mapped.items()]
    order = list(values)
    rows.sort(key=lambda row: order.index(row.key))
    origins: dict[str, list[Row]] = {}
    for row in rows:
        for name in mapped.get(row.key, ()):
            origins.setdefault(name, []).append(row)
    nested = _nested(settings)
    build(TrainConfig, nested, where=f"the imported {table.title} settings")
    return Imported(table, nested, rows, origins)


def _is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Return whether a value is among the choices; True is not 1 here."""
    return any(type(value) is type(choice) and value == choice for choice in choices) or (
        isinstance(value, float) and value in [choice for choice in choices if isinstance(choice, int)])


def _put_gpus(settings: dict[str, Any], gpus: int | None) -> None:
    """Put in the number of workers: the GPUs as given, or those that the file means, where it means several."""
    if gpus is None:
        gpus = settings.get("batch.virtual_ranks", 1)
        for axis in ("tensor", "pipeline", "context"):
            gpus *= settings.get(f"parallel.{axis}", 1)
        if gpus == 1:
            return
    settings.setdefault("elastic.max_workers", gpus)
    settings.setdefault("elastic.gpus_per_worker", 1)


def _without_unknown(settings: dict[str, Any]) -> dict[str, str]:
    """Remove settings that the chosen part does not have; return {setting: why}."""
    removed: dict[str, str] = {}
    for group, package in PARTS.items():
        kind = settings.get(f"{group}.kind", package.DEFAULT)
        if kind not in package.KIND.names():
            raise ConfigError(f"there is no {package.KIND.noun} {kind!r}", where=group,
                              fix=f"give one of {', '.join(package.KIND.names())} with --set {group}.kind=...")
        known = {"kind", *package.KIND.find(kind).model_fields}
        for name in [name for name in settings if name.startswith(f"{group}.")]:
            if name.partition(".")[2].split(".")[0] not in known:
                removed[name] = f"{group}.kind {kind} has no {name.partition('.')[2]}"
                del settings[name]
    return removed


def _row(table: Table, key: str, given: Any, names: tuple[str, ...], settings: Mapping[str, Any],
         refused: Mapping[str, str]) -> Row:
    entry = table.find(key)
    note = entry.how() if isinstance(entry, Mapped) else ""
    present = [name for name in names if name in settings]
    if present:
        return Row(key, given, "mapped", ", ".join(f"{name}: {settings[name]}" for name in present), note)
    reasons = [refused[name] for name in names if name in refused]
    if reasons:
        return Row(key, given, "not available", note="; ".join(reasons))
    return Row(key, given, "default", note=note)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *groups, last = name.split(".")
        node = nested
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = value
    order = list(TrainConfig.model_fields)
    return dict(sorted(nested.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
