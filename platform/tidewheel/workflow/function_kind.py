"""Steps that call a function of the user's own, and where its code comes from."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tidewheel import storage
from tidewheel.errors import ConfigError
from tidewheel.workflow.step_kind import Entry, Log, StepKind, Task, folder_hash
from tidewheel.workflow.steps import source_hash


class FunctionKind(StepKind):
    """`tw.Call`: the files that the function writes."""

    def recipe(self, entry: Entry) -> Any:
        return {"settings": entry["config"], "code": entry["code"], "function": entry["function"].partition(":")[2]}

    def content(self, entry: Entry, input: str, output: str) -> Any:
        return {}

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "functions", f"{entry['name']}-{key}")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        function = task.function or imported(task.entry)
        if task.function is None or _is_importable(function):
            check_source(function, task.entry)
        value = function(**task.needs, output=task.place, **task.entry["config"])
        try:
            json.dumps(value)
        except TypeError:
            raise ConfigError(f"the function returned {type(value).__name__}, which is not JSON",
                              where=task.entry["name"], fix="return numbers, texts, lists and dicts, or None; larger "
                              "things belong below `output`") from None
        return {"hash": folder_hash(task.place, value), "value": value}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        return folder_hash(place, artifact["value"]) == artifact["hash"]


def imported(entry: Entry) -> Callable[..., Any]:
    """Import the function of a `Call` by its name; `check_source` compares its source.

    Raises:
        ConfigError: there is no such module, or the function is not at the module's top.
    """
    module, _, name = entry["function"].partition(":")
    try:
        if module == "__main__" or "<" in name:
            raise ImportError(f"{name} cannot be imported from {module}")
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the function cannot be imported ({error})", where=entry["name"],
                          fix="define it at the top of a module that every node has") from None
    function: Callable[..., Any] = value
    return function


def check_source(function: Callable[..., Any], entry: Entry) -> None:
    """Check that an imported function is the one that the step's key was made of.

    Raises:
        ConfigError: its source differs here.
    """
    if (code := source_hash(function, where=entry["name"])) != entry["code"]:
        raise ConfigError(f"the source of the function {entry['function']} is {code} here, and {entry['code']} where "
                          "the workflow was made", where=entry["name"], fix="upload the code with the workflow "
                          "(working_dir=\".\"), or bring every node to the same version, and submit it again")


def _is_importable(function: Callable[..., Any]) -> bool:
    """Return whether a function was imported here, rather than unpickled with its code."""
    value: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        value = getattr(value, part, None)
    return value is function
