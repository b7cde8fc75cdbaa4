"""`strftime_now` of chat templates, from a date in the settings: the same tokens on every machine and in every run."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

from tidewheel.errors import InputError

_MOST_CHARACTERS = 200
# No %s, which depends on the machine's time zone, and no widths, which could make gigabytes.
_FORMAT = re.compile(r"(?:[^%]|%[-_0^#]?[aAbBcdDeFgGhHIjklmMnpPrRSTtuUVwWxXyYzZf%])*")


def strftime_of(date: datetime | None) -> Callable[[str], str]:
    """Return the function that a template calls `strftime_now`; it gives `date`, whatever the clock says.

    The function raises InputError when there is no date, because today's would make another data set tomorrow.
    """
    def strftime_now(format: str) -> str:
        import jinja2

        if date is None:
            raise InputError("the chat template asks for today's date (strftime_now), which changes every day, and the "
                             "tokens with it", where="tokenize.template_date",
                             fix="name the date on which the conversations take place: template_date: 2026-07-01 in "
                                 "the step tokenize")
        if not isinstance(format, str) or len(format) > _MOST_CHARACTERS or not _FORMAT.fullmatch(format):
            raise jinja2.TemplateError(f"strftime_now does not take the format {str(format)[:50]!r}")
        return date.strftime(format)

    return strftime_now
