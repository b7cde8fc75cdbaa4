"""Record how an output was made: package versions, the commit of the code, settings without passwords."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from tidewheel.errors import without_credentials


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return {package: installed version, or "not installed"}."""
    installed = {}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def python_version() -> str:
    """Return the version of Python."""
    return platform.python_version()


def git_commit() -> str:
    """Return the commit of the code, with a "+" if tracked files have changed; "" outside a git checkout."""
    folder = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5)
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=folder,
                                 capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "") if commit.returncode == 0 else ""


def without_secrets(value: Any) -> Any:
    """Return JSON values without the user names and passwords of URIs."""
    if isinstance(value, dict):
        return {key: without_secrets(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    return without_credentials(value) if isinstance(value, str) else value
