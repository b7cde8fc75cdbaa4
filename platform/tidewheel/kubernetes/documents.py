"""Read and write YAML as Kubernetes does: several documents in a file, no duplicate keys, no tags."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from tidewheel import yaml_text
from tidewheel.errors import ConfigError
from tidewheel.kubernetes.problem import Manifest

_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Blocks(_Dumper):  # type: ignore[misc]
    """YAML writer that keeps the lines of a text, so that a configuration in a ConfigMap stays readable."""


_Blocks.add_representer(str, lambda dumper, value: dumper.represent_scalar(
    "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None))


def read(text: str, where: str) -> list[Any]:
    """Return the documents of a YAML text, without empty ones.

    Args:
        text: the YAML text.
        where: name of the text in an error, which adds the line.

    Raises:
        ConfigError: the text is not YAML, or has a key twice.
    """
    try:
        return [document for document in yaml_text.load_all(text) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f"{where}:{mark.line + 1}" if mark else where
        raise ConfigError(f"not valid YAML: {getattr(error, 'problem', None) or error}", where=position,
                          fix="check indentation, quotes and keys at that line") from None


def manifests(text: str, where: str) -> list[Manifest]:
    """Return the Kubernetes objects of a YAML text, and the items of a List in its place.

    Args:
        text: the YAML text.
        where: name of the text in an error.

    Raises:
        ConfigError: a document is not an object with apiVersion, kind and metadata.
    """
    objects: list[Manifest] = []
    for index, document in enumerate(read(text, where)):
        is_list = isinstance(document, dict) and document.get("kind") == "List"
        for item in document.get("items", []) if is_list else [document]:
            if not (isinstance(item, dict) and isinstance(item.get("kind"), str)
                    and isinstance(item.get("apiVersion"), str) and isinstance(item.get("metadata"), dict)):
                raise ConfigError(f"document {index} is not a Kubernetes object: it needs apiVersion, kind and "
                                  "metadata", where=where, fix="give manifests, not a kustomization or a values file")
            objects.append(item)
    return objects


def write(values: Iterable[Any]) -> str:
    """Return values as YAML documents, separated as kubectl expects."""
    return "---\n".join(yaml.dump(value, Dumper=_Blocks, sort_keys=False, width=120, allow_unicode=True)
                        for value in values)
