"""A private folder and token for the cluster of one run on this machine.

Ray's default is a folder that everyone can write, `/tmp/ray`, and one token for all of a user's clusters.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

from tidewheel.private_folders import create_file, hold, remove_abandoned

TMP = Path("/tmp")
"""Not $TMPDIR: the folder is in the names of Unix sockets, which have 107 bytes."""
NODE_ADDRESS = "127.0.0.2"
"""On loopback; `ray.init` takes 127.0.0.1 for the outside address of the machine."""


def run_folder() -> Path:
    """Make a folder of mode 0700 for a cluster's sessions, and hold it until this process ends.

    Folders that killed processes have left are removed.
    """
    remove_abandoned(TMP)
    folder = TMP / f"tw-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    hold(folder)
    return folder


@functools.cache
def _folder_of_process(pid: int) -> Path:
    folder = run_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def make_token(folder: Path) -> Path:
    """Write a new token into the folder, readable by this user only; return the file."""
    path = folder / "token"
    _write_token(path)
    return path


def _write_token(path: Path) -> None:
    with os.fdopen(create_file(path), "w") as file:
        file.write(secrets.token_hex(32))


def private_arguments() -> dict[str, Any]:
    """Return arguments of `ray.init` for a cluster of this process alone, on loopback and in its own folder.

    The cluster also gets its own token, unless the environment names one or Ray is imported already: Ray reads the
    environment once.
    """
    folder = _folder_of_process(os.getpid())
    if not any(os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        if "ray" not in sys.modules:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(make_token(folder)))
        else:
            _close_token(Path.home() / ".ray/auth_token")
    arguments: dict[str, Any] = {"_temp_dir": str(folder / "ray")}
    if sys.platform == "linux":  # elsewhere loopback has one address
        arguments["_node_ip_address"] = NODE_ADDRESS
    return arguments


def _close_token(path: Path) -> None:
    """Make Ray's default token readable by this user only; write one if there is none."""
    with contextlib.suppress(OSError):  # a home folder that cannot be written holds no token
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            _write_token(path)
        path.chmod(0o600)
