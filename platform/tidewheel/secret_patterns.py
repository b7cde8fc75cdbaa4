"""What a key looks like in a text: one list, for manifests and for uploads."""

from __future__ import annotations

import re

KEYS = {
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36}\b|\bgithub_pat_[A-Za-z0-9_]{50,}",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
}
"""Regular expressions by what they match. None of them fits prose or code by chance."""
URL_PASSWORD = r"://[^/\s:@]+:[^/\s@]+@"
"""A user and a password inside a URL. Code that builds such a URL looks the same."""

_EACH = [(name, re.compile(pattern)) for name, pattern in KEYS.items()]


def key_in(text: str) -> str | None:
    """Return what kind of key `text` holds, never the key itself; None without one."""
    return next((name for name, pattern in _EACH if pattern.search(text)), None)
