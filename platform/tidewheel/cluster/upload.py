"""What a submission uploads: the files of the working folder, without what is ignored and what may hold secrets.

We choose the files and pack them ourselves, so that the package holds what the listing shows. Left to Ray, patterns of
nested ignore files could not bring a file back, and the content of a file could not decide.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidewheel.errors import ConfigError
from tidewheel.secret_patterns import key_in

#: Folders that no job needs, beside Ray's own defaults (.git, .venv, venv, __pycache__). --include cannot bring them
#: back: a pattern such as "*.env" would find files in a virtual environment.
CLUTTER = (".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", "node_modules/")
#: Files that usually hold secrets, in lower case, as in .gitignore.
SECRETS = (
    ".env", ".env.*", "*.env", ".envrc", "secrets.yaml", "secrets.yml", "secrets.json", "secrets.toml",
    "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdbx", ".gnupg/",
    ".ssh/", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".git-credentials", ".htpasswd",
    ".aws/", ".azure/", ".config/gcloud/", ".boto", ".s3cfg", "rclone.conf", "*credentials*.json",
    "service-account*.json", "service_account*.json", ".kube/", "kubeconfig", "*.kubeconfig", ".docker/config.json",
    ".dockercfg", ".dockerconfigjson", "*.tfstate", "*.tfstate.*", "*.tfvars", ".terraformrc", ".vault-token",
    ".npmrc", ".yarnrc.yml", ".pypirc", ".cargo/credentials*", ".gem/credentials", ".config/gh/", ".databrickscfg",
    ".pgpass", ".my.cnf", ".huggingface/", ".ray/")
IGNORE_FILES = (".gitignore", ".rayignore", ".tidewheelignore")  # in one folder the later ones have the last word
SCAN_BYTES = 1 << 20
"""Larger files are not searched for keys: people put keys into small files, and data into large ones."""
LIMIT_BYTES = 512 << 20  # of Ray's own store for packages
SHOWN = 10  # names in the line about what is left out
_MADE = (1980, 1, 1, 0, 0, 0)
"""Time of all files in a package: equal files give equal bytes, so Ray finds that it has the package."""


@dataclass(frozen=True)
class Upload:
    """Files of a working folder that are uploaded, by path below it, with their sizes in bytes."""

    folder: str
    files: dict[str, int]
    secrets: dict[str, str] = field(default_factory=dict)
    """Files that are left out because they may hold secrets, with the reason."""

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

    def left_out(self) -> str:
        """One line about files that may hold secrets; empty when there are none."""
        if not self.secrets:
            return ""
        names = [f"{path} ({reason})" for path, reason in list(self.secrets.items())[:SHOWN]]
        if len(self.secrets) > SHOWN:
            names.append(f"{len(self.secrets) - SHOWN:,} more")
        count = "1 file" if len(self.secrets) == 1 else f"{len(self.secrets):,} files"
        return f"left out {count} that may hold secrets: {', '.join(names)}; --include PATTERN uploads them"

    def pack(self, target: Path) -> None:
        """Write the files to the zip file `target`; equal files give equal bytes."""
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as package:
            for name in self.files:
                path = Path(self.folder, name)
                entry = zipfile.ZipInfo(name, _MADE)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = (stat.S_IMODE(path.stat().st_mode) | stat.S_IFREG) << 16
                package.writestr(entry, path.read_bytes())


def survey(folder: str, excludes: Sequence[str] = (), includes: Sequence[str] = ()) -> Upload:
    """Choose the files of a working folder that are uploaded.

    Args:
        folder: the working folder.
        excludes: more patterns to leave out, as in .gitignore.
        includes: patterns of files to upload although they are ignored, excluded or may hold secrets.

    Raises:
        ConfigError: there is no such folder, or its files are more than Ray takes.
    """
    top = Path(folder).expanduser().absolute()
    if not top.is_dir():
        raise ConfigError("there is no such folder", where=str(top), mend="give the folder of your code, --working-dir")
    files: dict[str, int] = {}
    secrets: dict[str, str] = {}
    secret_names = _patterns(SECRETS)
    included = _patterns(includes)
    for path, ignored in _Walk(top, excludes, descend=bool(includes)).files():
        name = path.relative_to(top).as_posix()
        if not included.match_file(name):
            if ignored:
                continue
            secret = "by its name" if secret_names.match_file(name.lower()) else _key_inside(path)
            if secret:
                secrets[name] = secret
                continue
        files[name] = path.stat().st_size
    found = Upload(str(top), dict(sorted(files.items())), dict(sorted(secrets.items())))
    if found.bytes > LIMIT_BYTES:
        largest = ", ".join(f"{row['upload']} {row['KB'] / 1000:,.0f} MB" for row in found.rows()[:3])
        raise ConfigError(f"{found.summary()} are more than the {LIMIT_BYTES >> 20} MiB that Ray takes ({largest})",
                          where=str(top), mend="list what the job does not need in .tidewheelignore, or give a smaller "
                                               "--working-dir; data belongs on storage that every node sees")
    return found


class _Walk:
    """The files below a folder, each with whether it is ignored, as git decides it: the deepest ignore file that says
    anything about a path decides, its last pattern first, and nothing below an ignored folder comes back.

    Args:
        top: the folder.
        excludes: patterns that no ignore file overrules.
        descend: also list what lies in ignored folders.
    """

    def __init__(self, top: Path, excludes: Sequence[str], *, descend: bool) -> None:
        from ray._private import ray_constants

        self._top = top
        self._descend = descend
        self._clutter = _patterns([*ray_constants.get_runtime_env_default_excludes(), *CLUTTER])
        self._excludes = _patterns(excludes)
        without_git = os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") == "1"
        self._ignore_files = IGNORE_FILES[1:] if without_git else IGNORE_FILES

    def files(self) -> Iterator[tuple[Path, bool]]:
        """Every regular file, and whether it is ignored."""
        return self._below(self._top, self._above(), False, frozenset())

    def _above(self) -> list[tuple[Path, Any]]:
        """Patterns of the repository that the folder is a part of."""
        parents = list(self._top.parents)
        root = next((parent for parent in [self._top, *parents] if (parent / ".git").exists()), None)
        if root is None or ".gitignore" not in self._ignore_files:
            return []
        layers = _layer(root, [root / ".git/info/exclude"])
        for parent in reversed(parents):
            if parent.is_relative_to(root):
                layers += _layer(parent, [parent / ".gitignore"])
        return layers

    def _below(self, folder: Path, layers: list[tuple[Path, Any]], ignored: bool, seen: frozenset[str]
               ) -> Iterator[tuple[Path, bool]]:
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder above
            return
        layers = layers + _layer(folder, [folder / name for name in self._ignore_files])
        for path in sorted(folder.iterdir()):
            is_folder = path.is_dir()
            name = path.relative_to(self._top).as_posix() + ("/" if is_folder else "")
            if self._clutter.match_file(name):
                continue
            left = ignored or self._excludes.match_file(name) or _ignored(path, is_folder, layers)
            if is_folder and (self._descend or not left):
                yield from self._below(path, layers, left, seen | {real})
            elif path.is_file():
                yield path, left


def _layer(folder: Path, files: Sequence[Path]) -> list[tuple[Path, Any]]:
    lines = [line for file in files if file.is_file()
             for line in file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()]
    return [(folder, _patterns(lines))] if lines else []


def _ignored(path: Path, is_folder: bool, layers: Sequence[tuple[Path, Any]]) -> bool:
    for folder, patterns in reversed(layers):
        answer = patterns.check_file(path.relative_to(folder).as_posix() + ("/" if is_folder else "")).include
        if answer is not None:
            return bool(answer)
    return False


def _patterns(lines: Sequence[str]) -> Any:
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise ConfigError(f"not a pattern as in .gitignore ({error})", where="upload",
                          mend="correct the pattern") from None


def _key_inside(path: Path) -> str | None:
    """What kind of key a small text file holds."""
    if path.stat().st_size > SCAN_BYTES:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", where=str(path),
                          mend="make it readable, or leave it out with --exclude") from None
    if b"\0" in content:  # no text
        return None
    return key_in(content.decode("utf-8", errors="replace"))
