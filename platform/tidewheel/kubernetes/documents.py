"""YAML documents as Kubernetes reads them: several to a file, no key twice, no tags."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from tidewheel import yaml_text
from tidewheel.errors import ConfigError
from tidewheel.kubernetes.problem import Manifest

_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Blocks(_Dumper):  # type: ignore[misc]
    """A text of several lines is written as one: a configuration inside a ConfigMap stays readable."""


_Blocks.add_representer(str, lambda dumper, value: dumper.represent_scalar(
    "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None))


def read(text: str, where: str) -> list[Any]:
    """The documents of a YAML text that hold anything.

    Raises:
        ConfigError: not YAML, or a key is there twice; `where` is named with the line.
    """
    try:
        return [document for document in yaml_text.load_all(text) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        raise ConfigError(f"not valid YAML: {getattr(error, 'problem', None) or error}", where=place,
                          mend="check indentation, quotes and keys at that line") from None


def manifests(text: str, where: str) -> list[Manifest]:
    """The Kubernetes objects of a YAML text; a List counts as what it holds.

    Raises:
        ConfigError: a document is no object with apiVersion, kind and metadata.
    """
    found: list[Manifest] = []
    for number, document in enumerate(read(text, where)):
        is_list = isinstance(document, dict) and document.get("kind") == "List"
        for item in document.get("items", []) if is_list else [document]:
            if not (isinstance(item, dict) and isinstance(item.get("kind"), str)
                    and isinstance(item.get("apiVersion"), str) and isinstance(item.get("metadata"), dict)):
                raise ConfigError(f"document {number} is no Kubernetes object: it needs apiVersion, kind and metadata",
                                  where=where, mend="give manifests, not a kustomization or a values file")
            found.append(item)
    return found


def write(values: Iterable[Any]) -> str:
    """YAML documents, separated as kubectl wants them."""
    return "---\n".join(yaml.dump(value, Dumper=_Blocks, sort_keys=False, width=120, allow_unicode=True)
                        for value in values)
