"""Check manifests against closed schemas of the kinds in use, which allow neither unknown fields nor duplicates.

`vendor` makes the file of schemas; SOURCES.md names the projects, versions and licences.
"""

from __future__ import annotations

import difflib
import functools
import gzip
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from tidewheel.kubernetes.problem import Manifest, Problem, join, name_of


@functools.cache
def _vendored() -> dict[str, Any]:
    data = (resources.files("tidewheel.kubernetes") / "schemas.json.gz").read_bytes()
    loaded: dict[str, Any] = json.loads(gzip.decompress(data))
    return loaded


def kinds() -> list[str]:
    """Return the kinds that have a schema, as apiVersion/Kind."""
    return sorted(_vendored()["schemas"])


@functools.cache
def _validator(kind: str) -> Any:
    import jsonschema

    def unique(validator: Any, keys: list[str], items: Any, schema: Any) -> Iterator[Any]:
        seen = set()
        for index, item in enumerate(items if isinstance(items, list) else ()):
            key = tuple(str(item.get(name)) for name in keys) if isinstance(item, dict) else None
            if key is not None and key in seen:
                yield jsonschema.ValidationError(f"{' '.join(key)!r} is in the list twice", path=(index,))
            seen.add(key)

    checks = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"x-kubernetes-list-map-keys": unique})
    vendored = _vendored()
    return checks({**vendored["schemas"][kind], "definitions": vendored["definitions"]})


def check(manifest: Manifest) -> Iterator[Problem]:
    """Yield a problem for each field of a manifest that breaks the schema of its kind."""
    where = name_of(manifest)
    kind = f"{manifest.get('apiVersion')}/{manifest.get('kind')}"
    if kind not in _vendored()["schemas"]:
        near = difflib.get_close_matches(kind, kinds(), 1, 0.0)[0]
        yield Problem(where, "apiVersion", f"no schema for {kind}", f"nearest known kind: {near}; known are "
                      + ", ".join(kinds()))
        return
    for error in sorted(_validator(kind).iter_errors(manifest), key=lambda error: list(map(str, error.absolute_path))):
        yield from _explain(where, error)


def _explain(where: str, error: Any) -> Iterator[Problem]:
    path = tuple(error.absolute_path)
    allowed, value = error.validator_value, error.instance
    match error.validator:
        case "additionalProperties":
            known = list(error.schema.get("properties", {}))
            for key in (key for key in value if key not in known):
                near = difflib.get_close_matches(key, known, 1, 0.5)
                yield Problem(where, join(*path, key), "unknown field",
                              f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}")
        case "required":
            for key in (key for key in allowed if key not in value):
                yield Problem(where, join(*path, key), "missing", "add it: the API server requires it")
        case "type":
            types = [allowed] if isinstance(allowed, str) else [name for name in allowed if name != "null"]
            quote = " and not quoted" if isinstance(value, str) else ": quote it" if types == ["string"] else ""
            yield Problem(where, join(*path), f"{_shown(value)} is {_type(value)}",
                          f"it must be {' or '.join(types)}{quote}")
        case "enum":
            near = difflib.get_close_matches(str(value), [str(choice) for choice in allowed], 1, 0.3)
            choices = ", ".join(str(choice) for choice in allowed if choice is not None)
            yield Problem(where, join(*path), f"{_shown(value)} is not one of {choices}",
                          f"did you mean {near[0]}?" if near else "choose one of them")
        case "minimum" | "maximum":
            side = "at least" if error.validator == "minimum" else "at most"
            yield Problem(where, join(*path), f"{_shown(value)} is out of range", f"it must be {side} {allowed}")
        case "x-kubernetes-list-map-keys":
            yield Problem(where, join(*path), error.message, "keep one of the two")
        case _:
            yield Problem(where, join(*path), f"{_shown(value)} does not match {error.validator} {_shown(allowed)}",
                          "write it in the form that the Kubernetes API requires")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _type(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
             type(None): "null"}
    return names.get(type(value), type(value).__name__)
