"""Rule for secrets: manifests refer to a Secret that is made elsewhere and hold no value of one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tidewheel.kubernetes.problem import Manifest, Problem, at, get, walk
from tidewheel.secret_patterns import KEYS, URL_PASSWORD

NAMES = re.compile(r"(?i)(password|passwd|secret|token|credential|api_?key|access_?key|private_?key)")
NOT_VALUES = re.compile(r"(?i)(_path|_file|_mode|_name|_dir)$")
VALUES = re.compile("|".join([*KEYS.values(), URL_PASSWORD]))
"""Keys, and passwords in URLs."""
MEND = "make a Secret outside of the manifests, and refer to it with valueFrom.secretKeyRef"


def none_inside(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report Secrets with content, variables with a secret's name and a value, and texts that look like keys.

    The value itself is never shown.
    """
    for manifest in manifests:
        if manifest["kind"] == "Secret":
            for name in ("data", "stringData"):
                if get(manifest, name):
                    yield at(manifest, (name,), "a secret in the manifests", MEND)
        for path, value in walk(manifest):
            if isinstance(value, str) and VALUES.search(value):
                yield at(manifest, path, "looks like a key or a password", MEND)
            if isinstance(value, dict) and "name" in value and isinstance(value.get("value"), str) and value["value"] \
                    and NAMES.search(str(value["name"])) and not NOT_VALUES.search(str(value["name"])):
                yield at(manifest, (*path, "value"), f"{value['name']} has its value here", MEND)
