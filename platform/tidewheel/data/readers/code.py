"""Read source code: each file is a document with its path, language and text. Skip other files with a reason.

Skipped files are not faults of the input: they are counted by reason and do not go to quarantine. A text file in an
encoding other than UTF-8 or UTF-16 is a bad record, as in other readers.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel.data.languages import language_of
from tidewheel.data.quarantine import Bad
from tidewheel.data.read_config import CodeConfig, ReadConfig
from tidewheel.data.readers.packed import encoding_of
from tidewheel.data.readers.record import Location, Record, record
from tidewheel.storage import Store

#: Reasons for which a file is skipped, each with an explanation.
REASONS = {
    "symbolic_link": "a symbolic link, which is never followed",
    "no_file": "a device, a pipe or a socket",
    "hidden": "its name, or that of a folder above it, begins with a dot",
    "vendored": "other people's code, by the name of a folder above it",
    "generated": "written by a program, according to its name or its first lines",
    "unknown_language": "its name does not identify a language",
    "other_language": "not one of the languages in read.code.languages",
    "too_large": "larger than read.code.max_bytes",
    "binary": "it contains null bytes",
    "empty": "it contains only white space",
}
_VENDORED = frozenset({
    "node_modules", "bower_components", "jspm_packages", "vendor", "vendors", "vendored", "third_party", "third-party",
    "thirdparty", "3rdparty", "external_libs", "site-packages", "dist-packages", "venv", "virtualenv", "__pycache__",
    "pods", "carthage", "godeps", "elm-stuff"})
_GENERATED_NAMES = re.compile(
    r"(?:\.min\.(?:js|css)|\.map|\.lock|_pb2(?:_grpc)?\.pyi?|\.pb\.(?:go|cc|h)|\.g\.(?:dart|cs)|\.designer\.cs|\.freezed"
    r"\.dart|(?:^|/)(?:package-lock\.json|npm-shrinkwrap\.json|pnpm-lock\.yaml|go\.sum|gradlew|gradlew\.bat))$")
_GENERATED_WORDS = re.compile(
    rb"@generated\b|\bauto-?generated\b|\bgenerated (?:by|from|with|using)\b|\bdo not (?:edit|modify)\b", re.IGNORECASE)
_HEAD_LINES, _HEAD_BYTES = 5, 1000
_PACKED_LINE = 500  # average bytes per line above which a script is minified
_PACKED_LANGUAGES = ("JavaScript", "CSS")


@dataclass(frozen=True)
class Skipped:
    """A skipped file; `reason` is one of `REASONS`."""

    path: str
    reason: str


def reason_by_name(path: str, size: int, config: CodeConfig) -> str:
    """Return the reason to skip a file that follows from its path and length; "" if the file may be read.

    Args:
        path: its path below the input.
        size: its length in bytes.
        config: the settings of `read.code`.
    """
    parts = path.split("/")
    language = language_of(path)
    conditions = {
        "hidden": any(part.startswith(".") for part in parts),
        "vendored": any(folder.lower() in _VENDORED for folder in parts[:-1]),
        "generated": _GENERATED_NAMES.search(path.lower()) is not None,
        "unknown_language": not language,
        "other_language": bool(language and config.languages) and language not in config.languages,
        "too_large": size > config.max_bytes,
    }
    return next((reason for reason, holds in conditions.items() if holds and reason not in config.keep), "")


def records(store: Store, files: Sequence[tuple[str, str]], config: ReadConfig) -> Iterator[Record | Bad | Skipped]:
    """Yield the records of source files, in order, and `Skipped` for files that are left out.

    A record has the fields `id` and `path` (both the path), `source` (the first folder of the path), `language` and the
    text.

    Args:
        store: the store of the files.
        files: (key, name in quarantine and lineage) of each file.
        config: the settings of `read`.
    """
    for key, name in files:
        data = _read(store, key, config.code.max_bytes + 1)
        if isinstance(data, Skipped):
            yield data
        elif reason := _reason_by_content(key, data, config.code):
            yield Skipped(key, reason)
        else:
            yield _record(key, data, config, Location(name, 1, 0))


def _read(store: Store, key: str, most: int) -> bytes | Skipped:
    path = store.local_path(key)
    if path is None:
        return store.read(key, 0, most)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Skipped(key, "symbolic_link")
        return store.read(key, 0, most)  # raises an error with a fix
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read(most)


def _reason_by_content(key: str, data: bytes, config: CodeConfig) -> str:
    if len(data) > config.max_bytes:
        return "too_large"
    if not data.strip():
        return "empty"
    if b"\0" in data and not encoding_of(data):
        return "binary"
    if "generated" not in config.keep and (_says_generated(data) or _is_packed(key, data)):
        return "generated"
    return ""


def _says_generated(data: bytes) -> bool:
    head = b"\n".join(data[:_HEAD_BYTES].split(b"\n")[:_HEAD_LINES])
    return _GENERATED_WORDS.search(head) is not None


def _is_packed(key: str, data: bytes) -> bool:
    return language_of(key) in _PACKED_LANGUAGES and len(data) > _PACKED_LINE * (1 + data.count(b"\n"))


def _record(key: str, data: bytes, config: ReadConfig, location: Location) -> Record | Bad:
    encoding = encoding_of(data)
    try:
        text = data.decode(encoding or "utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return location.bad("wrong_encoding", data, f"byte {error.start}: {error.reason}")
    first, separator, _ = key.partition("/")
    values: dict[str, Any] = {config.text_name: text, "path": key}
    values |= {config.id: key} if config.id else {}
    values |= {config.source: first if separator else "."} if config.source else {}
    if language := language_of(key):
        values[config.language or "language"] = language
    return record(values, config, location, data)
