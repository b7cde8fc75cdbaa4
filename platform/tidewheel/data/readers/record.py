"""Convert the fields of one record into a document, or into a bad record with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidewheel.data.document import content_id, encode_meta
from tidewheel.data.quarantine import Bad, bad_record
from tidewheel.data.readers.conversations import as_document
from tidewheel.data.readers.messages import UnusableError
from tidewheel.data.text_template import TextTemplate
from tidewheel.versions import Version

if TYPE_CHECKING:
    from tidewheel.data.read_config import ReadConfig

RECORDS = Version("records")
"""Version of decompression, of format recognition, and of the conversion of fields into a document or bad record."""
OWN_READERS = Version("own_readers", uses=(RECORDS,))
"""The same for readers from outside the package; keys also contain the hash of their source."""
CANONICAL = ("url", "language", "license")
"""Fields that have these names in `meta`, whatever their names in the input."""


@dataclass(frozen=True)
class Record:
    """A valid record: the four fields of a document, and its location.

    Args:
        id: the document's id: the record's own, or the hash of the text.
        text: the document's text.
        source: the record's source, or else the name of the file.
        meta: JSON of the record's other fields, `_file`, `_offset`, `_line` if known, and `url`, `language` and
            `license` if the record has them.
        line: number of the line, from 1; 0 if unknown, because reading began in the middle of the file.
        offset: offset of the record's first byte in the decompressed file; of a row, its number from 0.
        raw_bytes: length of the record in the file.
    """

    id: str
    text: str
    source: str
    meta: str
    line: int
    offset: int
    raw_bytes: int


@dataclass(frozen=True)
class Location:
    """Location of a record: the file as the pipeline names it; line and offset as in `Record`."""

    file: str
    line: int
    offset: int

    def bad(self, reason: str, raw: bytes, detail: str = "") -> Bad:
        """Return the quarantine entry of the record at this location.

        Args:
            reason: one of `quarantine.REASONS`.
            raw: the record's bytes.
            detail: message of the parser.
        """
        return bad_record(self.file, self.line, self.offset, reason, raw, detail)


def record(values: dict[str, Any], config: ReadConfig, location: Location, raw: bytes) -> Record | Bad:
    """Return the document that a record with these fields is, or its quarantine entry.

    Args:
        values: JSON values by field; modified in place.
        config: the settings of `read`, which map fields.
        location: where the record is.
        raw: the record's bytes in the file, for quarantine.
    """
    _raise_nested(values, config)
    if config.kind != "documents":
        try:
            as_document(values, config)
        except UnusableError as error:
            return location.bad(error.reason, raw, error.detail)
    if isinstance(config.text, TextTemplate):
        if problem := config.text.problem(values):
            return location.bad(problem[0], raw, problem[1])
        text: Any = config.text.filled(values)
    else:
        text = values.get(config.text)
    if text is None:
        return location.bad("missing_text", raw, f"no field {config.text!r}; there are: "
                                              f"{', '.join(map(repr, list(values)[:8]))}")
    if reason := text_problem(text):
        return location.bad(reason, raw, "" if isinstance(text, str) else f"a JSON {type(text).__name__}")
    given = values.get(config.id) if config.id else None
    identity = _identity(given, text)
    if identity is None:
        return location.bad("invalid_id", raw, repr(given)[:100])
    source = values.get(config.source) if config.source else None
    if not (source is None or _is_text(source)):
        return location.bad("invalid_source", raw, repr(source)[:100])
    meta = _others(values, config)
    for name in CANONICAL:
        field = getattr(config, name)
        value = values.get(field) if field else None
        if not (value is None or _is_text(value)):
            return location.bad("invalid_field", raw, f"{field}: {value!r}"[:100])
        if value:
            meta[name] = value
    meta |= {"_file": location.file, "_offset": location.offset, **({"_line": location.line} if location.line else {})}
    encoded = encode_meta(meta)
    return Record(identity, text, source or location.file, encoded, location.line, location.offset, len(raw))


def document_fields(config: ReadConfig) -> set[str]:
    """Return the fields that the settings name for a document: text or numbers."""
    names = (*config.text_fields, config.id, config.source, config.url, config.language, config.license)
    return {name for name in names if name}


def message_fields(config: ReadConfig) -> set[str]:
    """Return the fields that the settings name for messages; none for documents."""
    if config.kind == "documents":
        return set()
    if config.kind == "preferences":
        single = config.label or config.step_labels
        answers = {config.completion, single} if single else {config.chosen, config.rejected}
        return {config.prompt, config.tools, config.margin, *answers} - {""}
    return {config.messages, config.conversations, config.prompt, config.completion, config.instruction, config.input,
            config.output, config.system, config.tools}


def _raise_nested(values: dict[str, Any], config: ReadConfig) -> None:
    """Move the value of a dotted name such as `data.text` out of the object `data`, to a field of that name."""
    for name in sorted(document_fields(config) | message_fields(config)):
        if "." in name and name not in values:
            value, rest = _extracted(values, name.split("."))
            if value is not None:
                values.clear()
                values.update(rest)
                values[name] = value


def _extracted(values: Mapping[str, Any], path: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return (value at the end of the path or None, `values` without it and without objects that this empties)."""
    head, *more = path
    rest = dict(values)
    if not more:
        return rest.pop(head, None), rest
    inner = rest.get(head)
    if not isinstance(inner, dict):
        return None, rest
    value, remaining = _extracted(inner, more)
    if remaining:
        rest[head] = remaining
    else:
        del rest[head]
    return value, rest


def _others(values: Mapping[str, Any], config: ReadConfig) -> dict[str, Any]:
    """Return the fields that are not mapped. An unmapped field with a canonical name gets the prefix "_"."""
    mapped = {*config.text_fields, config.id, config.source, config.url, config.language, config.license}
    return {f"_{name}" if name in CANONICAL else name: value for name, value in values.items() if name not in mapped}


def text_problem(text: Any) -> str:
    """Return the reason why this value cannot be a document's text; "" if it can."""
    if not isinstance(text, str):
        return "text_not_string"
    if not text or text.isspace():
        return "empty_text"
    if "\x00" in text:
        return "null_bytes"
    return "" if _is_unicode(text) else "invalid_unicode"


def _identity(given: Any, text: str) -> str | None:
    """Return the id as a string, or the hash of the text if no id is given; None if the given id is invalid."""
    if given is None:
        return content_id(text)
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    return given if _is_text(given) and given != "" and "\x00" not in given else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and _is_unicode(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
