"""The cases that a piece of code is tested with, read from a sample's reference."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any

from tidewheel.rewards.sandbox.child import text_of

PARSER_TRIES = 20
"""A try costs microseconds."""


class Unusable(Exception):
    """A reference has no cases."""


@dataclass(frozen=True)
class Case:
    """One test: a call and the text of its value, or a program's input and its output."""

    call: str = ""
    """An expression; "": the code is a program."""
    input: str = ""
    expected: str = ""


def cases_of(reference: str) -> list[Case]:
    """Return the cases of a reference: assertions in Python, or a JSON list.

    Args:
        reference: lines such as `assert add(2, 3) == 5` or `assert is_even(4)`; or
            `[{"call": "add(2, 3)", "equals": 5}, {"input": "2 3", "output": "5"}]`.

    Raises:
        Unusable: it has none, or something else.
    """
    try:
        found = _from_json(json.loads(reference)) if reference.lstrip().startswith("[") else _from_python(reference)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unusable(f"neither assertions nor a JSON list of cases: {error}") from None
    if not found:
        raise Unusable("there is no case")
    return found


def lines_of(output: str) -> list[str]:
    """Return the lines of an output without spaces at their ends and without empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]


def _from_json(values: Any) -> list[Case]:
    found = []
    for number, value in enumerate(values, start=1):
        keys = set(value) if isinstance(value, dict) else set()
        if keys == {"call", "equals"} and isinstance(value["call"], str):
            found.append(Case(_expression(value["call"]), expected=text_of(value["equals"])))
        elif keys == {"input", "output"} and all(isinstance(text, str) for text in value.values()):
            found.append(Case(input=value["input"], expected=value["output"]))
        else:
            raise Unusable(f'case {number} has neither "call" and "equals" nor "input" and "output"')
    return found


def _from_python(text: str) -> list[Case]:
    return [_asserted(statement) for statement in _parsed(text, "exec").body]


def _asserted(statement: ast.stmt) -> Case:
    test = statement.test if isinstance(statement, ast.Assert) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for call, value in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                return Case(ast.unparse(call), expected=text_of(ast.literal_eval(value)))
            except ValueError:
                continue
    expected = not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not))
    called = test.operand if isinstance(test, ast.UnaryOp) and not expected else test
    if isinstance(called, ast.Call):
        return Case(f"not not ({ast.unparse(called)})", expected=text_of(expected))  # the code may define `bool`
    raise Unusable(f"line {statement.lineno} is no `assert CALL == VALUE`, `assert CALL` or `assert not CALL`")


def _expression(text: str) -> str:
    _parsed(text, "eval")
    return text


def _parsed(text: str, mode: str) -> Any:
    """Return the syntax tree of a text.

    The parser of CPython before 3.11.8 counts its depth per interpreter, not per thread. It raises SystemError when
    another thread parses at the same time (https://github.com/python/cpython/issues/106905), so it is tried again.
    """
    for _ in range(PARSER_TRIES - 1):
        try:
            return ast.parse(text, mode=mode)
        except SystemError:
            continue
    return ast.parse(text, mode=mode)
