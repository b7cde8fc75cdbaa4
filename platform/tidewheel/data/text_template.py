"""Compose a document's text from several fields of a record: `text: {template: "{title}\n\n{body}"}`.

Braces may contain only names of fields: no attributes, indices, conversions or formats. So a template can only join
values of a record. `{{` and `}}` are literal braces.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import field_validator

from tidewheel.config import Config


class TextTemplate(Config):
    """Template that joins several fields to one text."""

    template: str
    """Text with the names of fields in braces, `data.title` for the field `title` of the object `data`."""

    @field_validator("template")
    @classmethod
    def _plain_names(cls, value: str) -> str:
        parts_of(value)
        return value

    @property
    def fields(self) -> tuple[str, ...]:
        """The distinct fields that it names."""
        return tuple(dict.fromkeys(name for _, name in parts_of(self.template) if name))

    def filled(self, values: Mapping[str, Any]) -> str:
        """Return the text; `values` must have every field."""
        return "".join(literal + (str(values[name]) if name else "") for literal, name in parts_of(self.template))

    def problem(self, values: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return (reason of `quarantine.REASONS`, detail) if a record's values cannot fill the template, else None."""
        for name in self.fields:
            value = values.get(name)
            if value is None:
                return "missing_text", (f"no field {name!r}, which the template names; there are: "
                                        f"{', '.join(map(repr, list(values)[:8]))}")
            if isinstance(value, bool) or not isinstance(value, str | int):
                return "text_not_string", f"the field {name!r}, which the template names, is a {type(value).__name__}"
        if not any(str(values[name]).strip() for name in self.fields):
            return "empty_text", "every field that the template names is empty"
        return None


@lru_cache(maxsize=64)
def parts_of(template: str) -> tuple[tuple[str, str], ...]:
    """Return (text, name of the field after it or "") for each part of a template.

    Raises:
        ValueError: braces contain something other than a name, or the template names no field.
    """
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ and }}}} for braces") from None
    parts = []
    for literal, name, form, conversion in parsed:
        if name is not None and (not name or form or conversion or any(mark in name for mark in "[]{}")):
            shown = f"{{{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}}}"
            raise ValueError(f"{shown} is not a plain name of a field, such as {{title}} or {{data.title}}")
        if name is not None and not all(name.split(".")):
            raise ValueError(f"{{{name}}} has an empty name before or after a dot")
        parts.append((literal, name or ""))
    if not any(name for _, name in parts):
        raise ValueError("it names no field; write for example {title}")
    return tuple(parts)
