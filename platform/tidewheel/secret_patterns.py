"""Patterns of credentials in text, shared by the checks of Kubernetes manifests and of uploads."""

from __future__ import annotations

import re

KEYS = {
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36}\b|\bgithub_pat_[A-Za-z0-9_]{50,}",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
}
"""Regular expressions by the credential that they match. None matches prose or code by chance."""
URL_PASSWORD = r"://[^/\s:@]+:[^/\s@]+@"
"""A user and a password inside a URL. Code that builds such a URL matches too."""

_COMPILED = [(name, re.compile(pattern)) for name, pattern in KEYS.items()]


def key_in(text: str) -> str | None:
    """Return the kind of credential that `text` contains, never the credential itself; None if there is none."""
    return next((name for name, pattern in _COMPILED if pattern.search(text)), None)
