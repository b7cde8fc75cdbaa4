"""Choose and pack the files of a working folder for a submission, without ignored ones and likely secrets.

Ray could pack the folder itself. But then patterns of nested ignore files could not include a file again, and a file's
content could not exclude it. Here the package holds exactly the files that the listing shows.
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

#: Folders that no job needs, beside Ray's defaults (.git, .venv, venv, __pycache__). --include does not include them,
#: as a pattern such as "*.env" would match files in a virtual environment.
CLUTTER = (".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", "node_modules/")
#: Patterns, as in .gitignore, of files that usually hold secrets; in lower case.
SECRETS = (
    ".env", ".env.*", "*.env", ".envrc", "secrets.yaml", "secrets.yml", "secrets.json", "secrets.toml",
    "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdbx", ".gnupg/",
    ".ssh/", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".git-credentials", ".htpasswd",
    ".aws/", ".azure/", ".config/gcloud/", ".boto", ".s3cfg", "rclone.conf", "*credentials*.json",
    "service-account*.json", "service_account*.json", ".kube/", "kubeconfig", "*.kubeconfig", ".docker/config.json",
    ".dockercfg", ".dockerconfigjson", "*.tfstate", "*.tfstate.*", "*.tfvars", ".terraformrc", ".vault-token",
    ".npmrc", ".yarnrc.yml", ".pypirc", ".cargo/credentials*", ".gem/credentials", ".config/gh/", ".databrickscfg",
    ".pgpass", ".my.cnf", ".huggingface/", ".ray/")
IGNORE_FILES = (".gitignore", ".rayignore", ".tidewheelignore")  # in one folder the later files take precedence
SCAN_BYTES = 1 << 20
"""Size of the largest file that is searched for keys: keys are in small files, data is in large ones."""
LIMIT_BYTES = 512 << 20
"""Size of Ray's store for packages."""
SHOWN = 10
"""Number of files that `Upload.left_out` names."""
_MADE = (1980, 1, 1, 0, 0, 0)
"""Time of all files in a package, so that equal files give equal bytes and Ray recognizes the package."""


@dataclass(frozen=True)
class Upload:
    """Files of a working folder to upload: path below the folder, and size in bytes."""

    folder: str
    files: dict[str, int]
    secrets: dict[str, str] = field(default_factory=dict)
    """Files left out because they may hold secrets, with the reason."""

    @property
    def bytes(self) -> int:
        """Size of all files before compression."""
        return sum(self.files.values())

    def rows(self, depth: int = 1) -> list[dict[str, Any]]:
        """Return a table of the top folders, to `depth` levels, and files with their sizes, largest first."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for path, size in self.files.items():
            parts = path.split("/")
            name = path if len(parts) <= depth else "/".join(parts[:depth]) + "/"
            sums[name][0] += 1
            sums[name][1] += size
        ordered = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
        return [{"upload": name, "files": count, "KB": round(size / 1000, 1)} for name, (count, size) in ordered]

    def summary(self) -> str:
        """Return one line about the upload."""
        return f"{len(self.files):,} files, {self.bytes / 1e6:.1f} MB from {self.folder}"

    def left_out(self) -> str:
        """Return one line about the files that may hold secrets; "" without any."""
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
    """Choose the files of a working folder to upload.

    Args:
        folder: the working folder.
        excludes: more patterns of files to leave out, as in .gitignore.
        includes: patterns of files to upload even if they are ignored, excluded or may hold secrets.

    Raises:
        ConfigError: there is no such folder, or its files exceed Ray's limit.
    """
    top = Path(folder).expanduser().absolute()
    if not top.is_dir():
        raise ConfigError("there is no such folder", where=str(top), fix="give the folder of your code, --working-dir")
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
    upload = Upload(str(top), dict(sorted(files.items())), dict(sorted(secrets.items())))
    if upload.bytes > LIMIT_BYTES:
        largest = ", ".join(f"{row['upload']} {row['KB'] / 1000:,.0f} MB" for row in upload.rows()[:3])
        raise ConfigError(f"{upload.summary()} are more than the {LIMIT_BYTES >> 20} MiB that Ray takes ({largest})",
                          where=str(top), fix="list what the job does not need in .tidewheelignore, or give a smaller "
                                              "--working-dir; data belongs on storage that every node sees")
    return upload


class _Walk:
    """Files below a folder, ignored or not by git's rules.

    The deepest ignore file with a pattern that matches decides, and in it the last such pattern. No pattern includes a
    file below an ignored folder again.

    Args:
        top: the folder.
        excludes: patterns that take precedence over all ignore files.
        descend: also list the files in ignored folders.
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
        """Yield every regular file, and whether it is ignored."""
        return self._below(self._top, self._above(), False, frozenset())

    def _above(self) -> list[tuple[Path, Any]]:
        """Return the patterns of the repository around the folder."""
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
                          fix="correct the pattern") from None


def _key_inside(path: Path) -> str | None:
    """Return the kind of key that a small text file holds; None without one."""
    if path.stat().st_size > SCAN_BYTES:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", where=str(path),
                          fix="make it readable, or leave it out with --exclude") from None
    if b"\0" in content:  # not a text
        return None
    return key_in(content.decode("utf-8", errors="replace"))
