"""Fields and Jinja templates of tasks, in a sandbox that limits their work and refuses unknown names."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tidewheel import expressions
from tidewheel.errors import InputError

Document = Mapping[str, Any]
"""An item of a task: its fields by name."""


class Templates:
    """Renders the templates of one task.

    Args:
        where: the task file, for error messages.
        fields: names of the fields that items have. A field that an item leaves out is None.
    """

    def __init__(self, where: str, fields: Sequence[str]) -> None:
        self._where, self._fields = where, list(fields)

    def value(self, key: str, template: Any, document: Document, row: str) -> Any:
        """Return a field if the template is its name, the rendered text if it is another string, else the template.

        Args:
            key: of the task file, for error messages.
            template: a setting.
            document: the item.
            row: the item's place, for error messages.

        Raises:
            InputError: the template is not valid Jinja, or uses a name that is no field.
        """
        if not isinstance(template, str):
            return template
        if template in self._fields:
            return document[template]
        return self.text(key, template, document, row)

    def text(self, key: str, template: str, document: Document, row: str) -> str:
        """Return a rendered template.

        Args:
            key: see `value`, also for the other arguments.
            template: the template.
            document: the item.
            row: the item's place.

        Raises:
            InputError: the template is not valid Jinja, or uses a name that is no field.
        """
        from jinja2 import TemplateError, UndefinedError

        from tidewheel.data.tokenize.template_work import WORK, WORK_OF_INPUT, rendered, size, work_limit

        if "{" not in template:
            return template
        try:
            with work_limit(WORK + WORK_OF_INPUT * size([dict(document), template])):
                return rendered(_compiled(template), **document)
        except UndefinedError as error:
            raise InputError(f"{key}: {error}{self._hint(str(error))}", where=f"{self._where}, item {row}",
                             fix="correct the name of the field in the template, or add the field to the data"
                             ) from None
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError,
                RecursionError) as error:
            raise InputError(f"{key}: the template fails ({type(error).__name__}: {error})"[:300],
                             where=f"{self._where}, item {row}", fix="correct the template, or the data") from None

    def _hint(self, problem: str) -> str:
        """Return the nearest field to the name that a message quotes."""
        name = re.search(r"'([^']*)' is undefined", problem)
        near = difflib.get_close_matches(name[1], self._fields, n=1, cutoff=0.5) if name else []
        return f", did you mean {near[0]!r}?" if near else f"; fields: {', '.join(self._fields)}"


def literal(text: str) -> Any:
    """Return the Python literal that a text spells, such as a list; the text itself if it spells none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


@lru_cache(maxsize=256)
def _compiled(source: str) -> Any:
    environment = _environment()
    return environment.from_string(source)


@lru_cache(maxsize=1)
def _environment() -> Any:
    try:
        from jinja2 import StrictUndefined
    except ImportError:
        raise InputError("the package jinja2, which runs the templates of tasks, is not installed", where="--tasks",
                         fix="pip install 'tidewheel[tokenizers]'") from None
    from tidewheel.data.tokenize.template_work import bounded_environment

    environment = bounded_environment({"regex_replace": _regex_replace})
    # white space stays as it is written
    return environment.overlay(trim_blocks=False, lstrip_blocks=False, keep_trailing_newline=True,
                               undefined=StrictUndefined)


def _regex_replace(text: str, pattern: str, repl: str, count: int = 0) -> str:
    return expressions.sub(pattern, repl, text, count)
