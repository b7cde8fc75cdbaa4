"""`strftime_now` of chat templates, with a date from the settings, so that every run gives the same tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

from tidewheel.errors import InputError

_MAX_CHARACTERS = 200
# %s is excluded because it depends on the machine's time zone, and widths because they could allocate gigabytes.
_FORMAT = re.compile(r"(?:[^%]|%[-_0^#]?[aAbBcdDeFgGhHIjklmMnpPrRSTtuUVwWxXyYzZf%])*")


def strftime_of(date: datetime | None) -> Callable[[str], str]:
    """Return the function `strftime_now` for templates, which formats `date` instead of the current time.

    The function raises InputError if `date` is None, because the current date would change the data set every day.
    """
    def strftime_now(format: str) -> str:
        import jinja2

        if date is None:
            raise InputError("the chat template uses today's date (strftime_now), so the tokens would change every "
                             "day", where="tokenize.template_date",
                             fix="set the date of the conversations: template_date: 2026-07-01 in the step tokenize")
        if not isinstance(format, str) or len(format) > _MAX_CHARACTERS or not _FORMAT.fullmatch(format):
            raise jinja2.TemplateError(f"strftime_now does not accept the format {str(format)[:50]!r}")
        return date.strftime(format)

    return strftime_now
