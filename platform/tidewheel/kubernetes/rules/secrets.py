"""Secrets are references: to a Secret that is made elsewhere. No value of one is in a manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tidewheel.kubernetes.problem import Manifest, Problem, at, get, walk

NAMES = re.compile(r"(?i)(password|passwd|secret|token|credential|api_?key|access_?key|private_?key)")
NOT_VALUES = re.compile(r"(?i)(_path|_file|_mode|_name|_dir)$")
VALUES = re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bgh[pousr]_[A-Za-z0-9]{36}\b"
                    r"|\bhf_[A-Za-z0-9]{30,}\b|://[^/\s:@]+:[^/\s@]+@")
"""Keys of AWS, private keys, tokens of GitHub and Hugging Face, passwords inside URLs."""
MEND = "make a Secret outside of the manifests, and refer to it with valueFrom.secretKeyRef"


def none_inside(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """No Secret with content, no variable with a secret's name and a value, nothing that looks like a key. The value
    itself is never shown."""
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
