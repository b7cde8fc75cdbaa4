"""Parts: the components of recipes and runs, found by name. Users add their own outside this package.

A part is a typed configuration class with the function that it configures. YAML, `--set` and the SDK name it in the
same three ways:

- the name of a built-in part, which is the name of its module: `gopher_quality`;
- `module:Class`, the user's own code, found from the working folder as `python -m` finds it. `--working-dir` sends it
  to a cluster;
- the name of an installed package's entry point, in the group of the part's kind: `tidewheel.filters`.

A part itself declares what other code must know about it, in class variables and methods of its kind's base class. Keys
of finished work contain the declared version of a built-in part, and the source hash of any other part.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import pydantic
from pydantic_core import core_schema

from tidewheel.config import Config, explain, unknown_key
from tidewheel.errors import ConfigError
from tidewheel.storage import content_hash
from tidewheel.versions import Version

P = TypeVar("P", bound="Part")
KIND, CODE = "kind", "code"
"""Keys of a part's name and its source hash in `Part.decisive`. No setting may have these names."""
MISTAKES = (TypeError, ValueError, AttributeError, LookupError, NameError, ArithmeticError, ImportError,
            NotImplementedError)
"""Errors of code that fails the same way each time. A RuntimeError may come from another worker or from the device."""
_names: dict[type[Part], str] = {}
"""Names of classes that were made from functions."""


class Part(Config):
    """Base class of all parts. The fields of a part are its settings."""

    VERSION: ClassVar[Version | None] = None
    """Version of the output, for built-in parts whose output keys depend on; `tests/golden` holds the output."""

    if not TYPE_CHECKING:  # type checkers see the fields as arguments
        def __init__(self, /, **settings: Any) -> None:
            """Set the part's settings by name.

            Raises:
                ConfigError: a setting is unknown, missing or wrong.
            """
            try:
                super().__init__(**settings)
            except pydantic.ValidationError as error:
                raise ConfigError(explain(type(self), error), where=name_of(type(self)),
                                  fix="correct the settings named above") from None

        __init__.__pydantic_base_init__ = True  # errors inside another configuration then have their path

    @pydantic.model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            if key not in cls.model_fields:
                raise unknown_key(str(key), cls.model_fields, values[key])
        return values

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Refuse settings named like the keys that `decisive` adds."""
        if taken := {KIND, CODE} & set(cls.model_fields):
            raise TypeError(f"{cls.__name__}: a setting cannot be called {taken.pop()!r}, choose another name")

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as JSON values."""
        return super().decisive()

    def decisive(self) -> dict[str, Any]:
        """Return `settings` plus the part's name as `kind`, and the source hash of a part outside this package."""
        name = name_of(type(self))
        code = {CODE: source_hash(type(self))} if is_own(name) else {}
        return {KIND: name, **code, **self.settings()}

    def decisive_beside(self, default: object) -> dict[str, Any]:
        """Return `decisive`, without `kind` if the field's default value is of the same kind."""
        values = self.decisive()
        if type(default) is type(self):
            del values["kind"]
        return values


@dataclass(frozen=True)
class Kind(Generic[P]):
    """One kind of part.

    Args:
        noun: name of the kind in messages, such as "filter".
        base: class that parts of this kind inherit from.
        package: package whose modules are the built-in parts; sub-packages are not parts.
        group: group of entry points of installed packages.
        wrap: makes a part's class from a plain function; None if parts of this kind cannot be functions.
    """

    noun: str
    base: type[P]
    package: str
    group: str
    wrap: Callable[[Callable[..., Any]], type[P]] | None = None

    @property
    def must_be(self) -> str:
        """Description of what a name must refer to, for messages."""
        shown = f"a class that inherits from tw.{self.base.__name__}"
        return f"{shown}, or a function" if self.wrap else shown

    def built_in(self) -> tuple[str, ...]:
        """Return the names of the built-in parts, sorted, without importing them."""
        return _modules(self.package)

    def names(self) -> tuple[str, ...]:
        """Return the names of all built-in and installed parts, sorted."""
        return tuple(sorted({*self.built_in(), *_entry_points(self.group)}))

    def find(self, name: str) -> type[P]:
        """Return the class of the part `name`.

        Raises:
            ConfigError: no part has this name, or the name refers to something else.
        """
        if is_own(name):
            return self._checked(name, *_load(name, self.noun, os.getcwd()))
        if name in self.built_in():
            module = importlib.import_module(f"{self.package}.{name}")
            return next(value for value in vars(module).values()
                        if self._is_part(value) and value.__module__ == module.__name__)
        if (target := _entry_points(self.group).get(name)) is not None:
            return self._checked(name, *_load(target, self.noun, os.getcwd()))
        near = difflib.get_close_matches(name, self.names(), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self.names())}"
        raise ConfigError(f"there is no {self.noun} {name!r}; {hint}", where=name,
                          fix=f"name one of these, or your own as module:name, which is {self.must_be}")

    def build(self, name: str, settings: Mapping[str, Any] | None = None) -> P:
        """Return the part `name` with `settings`.

        Raises:
            ConfigError: there is no such part.
            pydantic.ValidationError: a setting is unknown, missing or wrong.
        """
        return self.find(name).model_validate(dict(settings or {}))

    def _is_part(self, value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, self.base) and value is not self.base

    def _checked(self, name: str, value: Any, target: str, where: str) -> type[P]:
        if self._is_part(value):
            part: type[P] = value
            return part
        if self.wrap is not None and callable(value) and not isinstance(value, type):
            return _wrapped(self.wrap, value, target)
        attribute = target.partition(":")[2]
        if value is not None:
            raise ConfigError(f"{attribute!r} is no {self.noun} in {where}", where=name, fix=f"name {self.must_be}")
        parts = [known for known, value in vars(sys.modules[target.partition(":")[0]]).items() if self._is_part(value)]
        near = difflib.get_close_matches(attribute, parts, n=1, cutoff=0.5)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{attribute!r} does not exist in {where}{hint}", where=name, fix=f"name {self.must_be}")


@dataclass(frozen=True)
class Chosen:
    """Annotation of a configuration field that holds one part: `optimizer: Annotated[Optimizer, Chosen(...)]`.

    The field accepts the part itself, its name, or its settings with the name under `kind`.

    Args:
        kind: kind of the part.
        default: name of the part that settings without `kind` belong to; "" refuses such settings.
    """

    kind: Kind[Any]
    default: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
        """Return pydantic's schema for reading and writing the field."""
        written = core_schema.plain_serializer_function_ser_schema(as_json, when_used="always")
        return core_schema.no_info_before_validator_function(
            self._choose, core_schema.is_instance_schema(self.kind.base), serialization=written)

    def _choose(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.kind.build(value)
        if isinstance(value, Mapping):
            settings = {key: setting for key, setting in value.items() if key != KIND}
            name = str(value.get(KIND, self.default))
            if not name:
                raise ValueError(f"which {self.kind.noun} is it? Give its name in `kind`: one of "
                                 f"{', '.join(self.kind.names())}, or your own as module:name")
            return self.kind.build(name, settings)
        return value


def as_json(part: Part) -> dict[str, Any]:
    """Return all settings of a part with its name as `kind`, as JSON values."""
    return {KIND: name_of(type(part)), **part.canonical()}


def is_own(name: str) -> bool:
    """Return whether a name has the form `module:name`, which refers to code outside this package."""
    return ":" in name


def name_of(part: type[Part]) -> str:
    """Return the name by which any process can find a part: a built-in name, or `module:name`."""
    package, _, module = part.__module__.rpartition(".")
    if part in _names:
        return _names[part]
    return module if package.partition(".")[0] == __package__ else f"{part.__module__}:{part.__qualname__}"


def importable(name: str, where: str) -> str:
    """Return `name`, after checking that other processes can import it.

    Raises:
        ConfigError: the code is defined in a script or inside a function.
    """
    if name.startswith("__main__:") or "<" in name or "." in name.partition(":")[2]:
        raise ConfigError(f"workers cannot import {name}", where=where,
                          fix="define it at the top level of a module of its own, and import it from there")
    return name


def source_hash(part: type[Part]) -> str:
    """Return the hash of a part's source: its module, or the whole package that contains the module."""
    return _source_hash(name_of(part).partition(":")[0])


@dataclass(frozen=True)
class Code:
    """Location and hash of the source of a part outside this package.

    Args:
        name: `module:name` of the part.
        root: folder from which its module can be imported.
        hash: hash of its source.
    """

    name: str
    root: str
    hash: str

    @classmethod
    def of(cls, part: type[Part]) -> Code | None:
        """Return the code of a part; None for a built-in part, which every node has."""
        name = name_of(part)
        return cls(name, _root(name), source_hash(part)) if is_own(name) else None

    def load(self) -> None:
        """Import the module in this process.

        Raises:
            ConfigError: the module is missing on this node, or its source differs.
        """
        if self.root not in sys.path and Path(self.root).is_dir():
            sys.path.append(self.root)
        module = self.name.partition(":")[0]
        _module(module, self.name, "part", os.getcwd())
        if _source_hash(module) != self.hash:
            raise ConfigError(f"the source of {self.name} on this node differs from the one that the run started with",
                              where=self.name, fix="bring every node to the same version, or submit with "
                              "--working-dir, and run again")


@contextlib.contextmanager
def calling(part: Part) -> Iterator[None]:
    """Run a block that calls a part's code, and report the location of a mistake in code outside this package.

    Raises:
        ConfigError: the code raised one of `MISTAKES`, which a restart would not fix.
    """
    try:
        yield
    except MISTAKES as error:
        name = name_of(type(part))
        if not is_own(name):
            raise
        file = getattr(sys.modules.get(type(part).__module__), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
        raise ConfigError(f"{name} failed: {type(error).__name__}: {error}", where=f"{frame.filename}:{frame.lineno}",
                          fix="correct the code there, and start again") from error


@cache
def _modules(package: str) -> tuple[str, ...]:
    folders = importlib.import_module(package).__path__
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders) if not module.ispkg))


@cache
def _entry_points(group: str) -> dict[str, str]:
    """Return {name: "module:Class"} of a group."""
    return {point.name: point.value for point in importlib.metadata.entry_points(group=group)}


def _wrapped(wrap: Callable[[Callable[..., Any]], type[P]], function: Callable[..., Any], name: str) -> type[P]:
    wrapped = next((part for part, known in _names.items()
                    if known == name and getattr(part, "function", None) is function), None)
    if wrapped is None:
        wrapped = wrap(function)
        _names[wrapped] = name
    return wrapped  # type: ignore[return-value]


@lru_cache(maxsize=256)
def _load(name: str, noun: str, folder: str) -> tuple[Any, str, str]:
    """Return the object that `module:name` refers to (or None), the name, and the file of the module."""
    module_name, _, attribute = name.partition(":")
    module = _module(module_name, name, noun, folder)
    return getattr(module, attribute, None), name, str(module.__file__)


def _module(module_name: str, name: str, noun: str, folder: str) -> ModuleType:
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that nothing there can shadow an installed package
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"the module of the {noun} needs {error.name!r}, which is not installed", where=name,
                              fix=f"pip install it on every node; the {noun} is in {module_name}") from None
        raise ConfigError(f"there is no module {module_name!r} in {folder} or among the installed packages",
                          where=name, fix="run from the folder that contains it; on a cluster, submit with "
                          "--working-dir") from None


@lru_cache(maxsize=256)
def _source_hash(module_name: str) -> str:
    module = sys.modules[module_name]
    top = sys.modules[module.__name__.partition(".")[0]]
    folders = list(getattr(top, "__path__", ()))
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.py")) if folders else [
        Path(str(module.__file__))]
    parts = [f"{path.name if not folders else path.relative_to(folders[0])}\n".encode() + path.read_bytes()
             for path in files]
    return content_hash(b"\0".join(parts))


def _root(name: str) -> str:
    top = sys.modules[name.partition(":")[0].partition(".")[0]]
    return str(Path(str(top.__file__)).resolve().parents[1 if hasattr(top, "__path__") else 0])
