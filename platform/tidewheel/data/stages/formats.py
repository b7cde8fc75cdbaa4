"""Group the input files by format and read the first record of each format, for `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidewheel.data import readers
from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import REASONS, Bad
from tidewheel.data.readers import Record, code
from tidewheel.data.stages.sources import SourceFile
from tidewheel.storage import Store, store

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class FormatLine:
    """Input files of one format.

    Args:
        format: the format with its compression, or why the files cannot be read.
        files: number of files.
        bytes: size of the files as stored.
        example: name of the first file.
        record: first record of the first file: the beginning of its text, or what is wrong with it.
        is_usable: False if that record, or the format, cannot be used.
    """

    format: str
    files: int
    bytes: int
    example: str
    record: str
    is_usable: bool

    def row(self) -> dict[str, str]:
        """Return a table row."""
        return {"format": self.format, "files": f"{self.files:,}", "MB": f"{self.bytes / 1e6:,.1f}",
                "such as": self.example, "first record": self.record}


def by_format(files: Sequence[SourceFile], config: ReadConfig) -> tuple[FormatLine, ...]:
    """Return a line for each format, the one with most bytes first; read one record of each."""
    groups: dict[str, list[SourceFile]] = {}
    for file in files:
        groups.setdefault(str(file.shape), []).append(file)
    lines = []
    for name, group in groups.items():
        record, is_usable = _first_record(group[0], config)
        first = group[0].members[0].name if group[0].members else group[0].name
        lines.append(FormatLine(name, sum(len(file.members) or 1 for file in group),
                                sum(file.bytes for file in group), first, record, is_usable))
    return tuple(sorted(lines, key=lambda line: (-line.bytes, line.format)))


def _records(file_store: Store, file: SourceFile, config: ReadConfig) -> Iterator[Record | Bad]:
    if not file.members:
        return readers.read_records(file_store, file.key, config, name=file.name, shape=file.shape)
    read = readers.read_bundle(file_store, [(member.key, member.name) for member in file.members], config, file.shape)
    return (record for record in read if not isinstance(record, code.Skipped))


def _first_record(file: SourceFile, config: ReadConfig) -> tuple[str, bool]:
    if file.shape.problem:
        return f"cannot be read: {file.shape.hint}", False
    file_store = store(file.root)
    try:
        record = next(_records(file_store, file, config), None)
    except readers.UnreadableFile as error:
        return f"cannot be read: {error}", False
    if record is None:
        return "none: the file is empty", False
    if isinstance(record, Bad):
        return f"cannot be used: {REASONS[record.reason]}" + (f" ({record.detail})" if record.detail else ""), False
    text = " ".join(record.text[: 4 * _SHOWN_CHARACTERS].split())
    text = "".join(character if character.isprintable() else "\ufffd" for character in text)
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}\u2026"
    return f"{record.id[:40]!r}: {shown}", True
