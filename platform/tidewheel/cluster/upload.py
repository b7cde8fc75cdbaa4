"""What a submission would upload: the working folder's files as Ray packs them, and what is left out on purpose."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidewheel.errors import ConfigError

#: Beside .gitignore, .rayignore and Ray's own defaults (.git, .venv, __pycache__): caches, and files that hold secrets.
EXCLUDES = (".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", "node_modules", ".env", ".env.*", "*.pem",
            "*.key", "id_rsa*", "id_ed25519*", ".aws", ".ssh", ".netrc", "*credentials*.json")
LIMIT_BYTES = 512 << 20  # of Ray's own store for packages


@dataclass(frozen=True)
class Upload:
    """Files of a working folder that would be uploaded, by path below it, with their sizes in bytes."""

    folder: str
    files: dict[str, int]

    @property
    def bytes(self) -> int:
        """Of all files, before compression."""
        return sum(self.files.values())

    def rows(self, depth: int = 1) -> list[dict[str, Any]]:
        """For a table: what each folder (`depth` levels) or file of the top brings, largest first."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for path, size in self.files.items():
            parts = path.split("/")
            name = path if len(parts) <= depth else "/".join(parts[:depth]) + "/"
            sums[name][0] += 1
            sums[name][1] += size
        ordered = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
        return [{"upload": name, "files": count, "KB": round(size / 1000, 1)} for name, (count, size) in ordered]

    def summary(self) -> str:
        """One line."""
        return f"{len(self.files):,} files, {self.bytes / 1e6:.1f} MB from {self.folder}"


def survey(folder: str, excludes: Sequence[str] = EXCLUDES) -> Upload:
    """The files that Ray would put into the package of this working folder.

    Raises:
        ConfigError: there is no such folder, or its files are more than Ray takes.
    """
    from ray._private import ray_constants
    from ray._private.runtime_env import packaging

    top = Path(folder).expanduser().absolute()
    if not top.is_dir():
        raise ConfigError("there is no such folder", where=str(top), mend="give the folder of your code, --working-dir")
    files: dict[str, int] = {}

    def look(path: Path) -> None:
        if path.is_file():
            files[path.relative_to(top).as_posix()] = path.stat().st_size

    excluded = [packaging._get_excludes(top, [*ray_constants.get_runtime_env_default_excludes(), *excludes])]
    gitignore = os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    packaging._dir_travel(top, excluded, look, include_gitignore=gitignore, logger=_silent())
    found = Upload(str(top), dict(sorted(files.items())))
    if found.bytes > LIMIT_BYTES:
        largest = ", ".join(f"{row['upload']} {row['KB'] / 1000:,.0f} MB" for row in found.rows()[:3])
        raise ConfigError(f"{found.summary()} are more than the {LIMIT_BYTES >> 20} MiB that Ray takes ({largest})",
                          where=str(top), mend="list what the job does not need in .rayignore, or give a smaller "
                                               "--working-dir; data belongs on storage that every node sees")
    return found


def _silent() -> Any:
    import logging

    return logging.getLogger("tidewheel.upload")
