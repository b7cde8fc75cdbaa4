"""What becomes of another tool's settings here: the entries of a tool's table, and its keys."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidewheel.errors import ConfigError

OFF: tuple[Any, ...] = (False, None, "", 0, "none", "None", "no", "NO", "False", "false", [], {})
"""Values with which a setting that we lack is off, and nothing is lost."""
AUTO = "auto"
"""DeepSpeed's word for a value that the launcher fills in."""


class Unavailable(Exception):
    """Value of another tool's setting that has no counterpart here; its text is the reason."""


@dataclass(frozen=True)
class Source:
    """The settings of another tool's file.

    Args:
        values: value of each dotted key.
        gpus: number of GPUs of the run as the user gave it; None: not given.
    """

    values: Mapping[str, Any]
    gpus: int | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; `default` where the key is absent, null or "auto"."""
        value = self.values.get(key)
        return default if value is None or value == AUTO else value


Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class Mapped:
    """A setting with a counterpart here.

    Args:
        key: its dotted key.
        to: our settings, separated by spaces.
        convert: from its value to ours, as a table or a function, which returns None where our default is meant and
            raises `Unavailable`. None: the same value.
        note: how it is converted, for the documentation and the comment in the YAML.
        joint: the value of `to` follows from several keys, in the table's `joint`.
    """

    key: str
    to: str
    convert: Mapping[Any, Any] | Convert | None = None
    note: str = ""
    joint: bool = False

    def value(self, given: Any) -> Any:
        """Return our value.

        Raises:
            Unavailable: there is none.
        """
        if self.convert is None:
            return given
        if isinstance(self.convert, Mapping):
            known = {str(name).lower(): value for name, value in self.convert.items()}
            if str(given).lower() not in known:
                raise Unavailable(f"{given!r} has no counterpart, only {', '.join(map(str, self.convert))}")
            return known[str(given).lower()]
        return self.convert(given)

    def how(self) -> str:
        """Return in words how the value is converted."""
        if isinstance(self.convert, Mapping) and not self.note:
            return ", ".join(f"{name}: {'default' if value is None else value}" for name, value in self.convert.items())
        return self.note


@dataclass(frozen=True)
class Meaningless:
    """Settings that mean nothing here, separated by spaces; `a.b.*` stands for everything below a.b."""

    reason: str
    keys: str


@dataclass(frozen=True)
class Missing:
    """Settings that would change the run and have no counterpart here, separated by spaces; as in `Meaningless`.

    Args:
        reason: why, or what to do instead.
        keys: the dotted keys.
        harmless: values with which nothing is lost.
    """

    reason: str
    keys: str
    harmless: tuple[Any, ...] = OFF


Entry = Mapped | Meaningless | Missing


@dataclass(frozen=True)
class Table:
    """The settings of one tool.

    Args:
        tool: name of the tool on the command line.
        title: its name in the documentation.
        source: where its settings are documented.
        entries: what becomes of each.
        joint: our settings that follow from several of its keys, by dotted name.
        formats: formats of its files: json, yaml, toml, arguments.
        notes: what holds for the whole file.
    """

    tool: str
    title: str
    source: str
    entries: tuple[Entry, ...]
    joint: Callable[[Source], dict[str, Any]]
    formats: tuple[str, ...]
    notes: tuple[str, ...] = ()
    by_key: dict[str, Entry] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_key: dict[str, Entry] = {}
        for entry in self.entries:
            for key in keys_of(entry):
                if key in by_key:
                    raise ValueError(f"{self.tool}: {key} is in the table twice")
                by_key[key] = entry
        object.__setattr__(self, "by_key", by_key)

    def is_leaf(self, key: str) -> bool:
        """Return whether a mapping under `key` is one value and no group of further keys."""
        return key in self.by_key and not self.is_group(key)

    def is_group(self, key: str) -> bool:
        """Return whether there are keys below `key`."""
        return any(known.startswith(f"{key}.") for known in self.by_key)

    def find(self, key: str) -> Entry:
        """Return what becomes of a key.

        Raises:
            ConfigError: the tool has no such key.
        """
        if key in self.by_key:
            return self.by_key[key]
        parts = key.split(".")
        for end in range(len(parts) - 1, 0, -1):
            group = ".".join([*parts[:end], "*"])
            if group in self.by_key:
                return self.by_key[group]
        near = difflib.get_close_matches(key, self.by_key, n=1, cutoff=0.5)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{self.title} has no setting {key!r}{hint}", where=key,
                          fix="correct or remove the key; docs/coming_from_keys.md lists all keys")

    def rows(self) -> Iterator[tuple[tuple[str, ...], str, str]]:
        """Yield (keys, our settings or what they are, how or why) of every entry, in order."""
        for entry in self.entries:
            if isinstance(entry, Mapped):
                yield keys_of(entry), ", ".join(f"<code>{name}</code>" for name in entry.to.split()), entry.how()
            else:
                what = "no meaning here" if isinstance(entry, Meaningless) else "not available"
                yield keys_of(entry), what, entry.reason


def keys_of(entry: Entry) -> tuple[str, ...]:
    """Return the keys of an entry."""
    return (entry.key,) if isinstance(entry, Mapped) else tuple(entry.keys.split())
