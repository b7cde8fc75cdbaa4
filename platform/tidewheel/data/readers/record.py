"""From the fields of one record to a document, or to what is wrong with it."""

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
"""How a file is unpacked, its format is recognised, and fields become a document or a bad record."""
OWN_READERS = Version("own_readers", uses=(RECORDS,))
"""The same for readers from outside the package; their source is in the keys beside this."""
CANONICAL = ("url", "language", "license")
"""Fields that `meta` holds under these names, whatever the input calls them."""


@dataclass(frozen=True)
class Record:
    """A valid record: the document's four fields, and where it was. `meta` is JSON: the record's other fields,
    `url`, `language` and `license` where given, `_file`, `_offset`, and `_line` where known.

    Args:
        line: from 1; 0 when unknown, because reading began in the middle of the file.
        offset: of the record's first byte in the unpacked file; of a row, its number from 0.
    """

    id: str
    text: str
    source: str
    meta: str
    line: int
    offset: int
    raw_bytes: int


@dataclass(frozen=True)
class Place:
    """Where a record is: the file as the pipeline names it; line and offset as in `Record`."""

    file: str
    line: int
    offset: int

    def bad(self, reason: str, raw: bytes, detail: str = "") -> Bad:
        """The record at this place, put aside."""
        return bad_record(self.file, self.line, self.offset, reason, raw, detail)


def record(values: dict[str, Any], config: ReadConfig, place: Place, raw: bytes) -> Record | Bad:
    """A record with these fields as a document.

    Args:
        values: JSON values by field; may be changed.
        config: which field is what.
        raw: the record as it is in the file, for quarantine.
    """
    _raise_nested(values, config)
    if config.kind != "documents":
        try:
            as_document(values, config)
        except UnusableError as error:
            return place.bad(error.reason, raw, error.detail)
    if isinstance(config.text, TextTemplate):
        if problem := config.text.problem(values):
            return place.bad(problem[0], raw, problem[1])
        text: Any = config.text.filled(values)
    else:
        text = values.get(config.text)
    if text is None:
        return place.bad("missing_text", raw, f"no field {config.text!r}; there are: "
                                              f"{', '.join(map(repr, list(values)[:8]))}")
    if reason := text_problem(text):
        return place.bad(reason, raw, "" if isinstance(text, str) else f"a JSON {type(text).__name__}")
    given = values.get(config.id) if config.id else None
    identity = _identity(given, text)
    if identity is None:
        return place.bad("invalid_id", raw, repr(given)[:100])
    source = values.get(config.source) if config.source else None
    if not (source is None or _is_text(source)):
        return place.bad("invalid_source", raw, repr(source)[:100])
    meta = _others(values, config)
    for name in CANONICAL:
        field = getattr(config, name)
        value = values.get(field) if field else None
        if not (value is None or _is_text(value)):
            return place.bad("invalid_field", raw, f"{field}: {value!r}"[:100])
        if value:
            meta[name] = value
    meta |= {"_file": place.file, "_offset": place.offset, **({"_line": place.line} if place.line else {})}
    encoded = encode_meta(meta)
    return Record(identity, text, source or place.file, encoded, place.line, place.offset, len(raw))


def document_fields(config: ReadConfig) -> set[str]:
    """The fields that the settings name for a document: text or numbers."""
    names = (*config.text_fields, config.id, config.source, config.url, config.language, config.license)
    return {name for name in names if name}


def message_fields(config: ReadConfig) -> set[str]:
    """The fields that the settings name for messages, if the records have any."""
    if config.kind == "documents":
        return set()
    if config.kind == "preferences":
        return {config.prompt, config.chosen, config.rejected, config.tools}
    return {config.messages, config.conversations, config.prompt, config.completion, config.instruction, config.input,
            config.output, config.system, config.tools}


def _raise_nested(values: dict[str, Any], config: ReadConfig) -> None:
    """Move what `data.text` names out of the object `data`, to a field of that very name."""
    for name in sorted(document_fields(config) | message_fields(config)):
        if "." in name and name not in values:
            found, rest = _taken(values, name.split("."))
            if found is not None:
                values.clear()
                values.update(rest)
                values[name] = found


def _taken(values: Mapping[str, Any], path: list[str]) -> tuple[Any, dict[str, Any]]:
    """(the value at the end of the path or None, `values` without it and without objects that it leaves empty)."""
    head, *more = path
    rest = dict(values)
    if not more:
        return rest.pop(head, None), rest
    inner = rest.get(head)
    if not isinstance(inner, dict):
        return None, rest
    found, left = _taken(inner, more)
    if left:
        rest[head] = left
    else:
        del rest[head]
    return found, rest


def _others(values: Mapping[str, Any], config: ReadConfig) -> dict[str, Any]:
    """Fields that are not mapped. One that has a canonical name but means something else gets "_" before it."""
    mapped = {*config.text_fields, config.id, config.source, config.url, config.language, config.license}
    return {f"_{name}" if name in CANONICAL else name: value for name, value in values.items() if name not in mapped}


def text_problem(text: Any) -> str:
    """Reason why this can be no document's text; "" when it can."""
    if not isinstance(text, str):
        return "text_not_string"
    if not text or text.isspace():
        return "empty_text"
    if "\x00" in text:
        return "null_bytes"
    return "" if _is_unicode(text) else "invalid_unicode"


def _identity(given: Any, text: str) -> str | None:
    """The id as a string, the content's if there is none; None when what is given cannot be one."""
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
