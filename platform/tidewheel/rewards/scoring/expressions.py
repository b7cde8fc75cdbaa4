"""Values of arithmetic expressions, as exact fractions. They come from a model, so lengths and depths are limited."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction

MAX_CHARACTERS = 400
"""A longer expression has no value."""
MAX_DEPTH = 40
"""Deepest nesting of parentheses and signs."""
SHOWN_DIGITS = 12
_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|[-+*/()])\s*")
_WRITTEN = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})
_PRODUCTS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {"*": Fraction.__mul__, "/": Fraction.__truediv__}
_SUMS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {"+": Fraction.__add__, "-": Fraction.__sub__}


class _NoExpression(Exception):
    """The text is no expression."""


def value_of(text: str) -> Fraction | None:
    """Return the value of an expression of decimal numbers, + - * / and parentheses; None if it has none.

    Args:
        text: such as "3 * (4 + 0.5)".
    """
    tokens = tokens_of(text)
    if not tokens:
        return None
    reader = _Reader(tokens)
    try:
        value = reader.sum(0)
    except (_NoExpression, ZeroDivisionError):
        return None
    return value if reader.is_at_end else None


def tokens_of(text: str) -> list[str]:
    """Return the numbers and signs of an expression; [] if the text has anything else or is too long."""
    text = text.translate(_WRITTEN).strip()
    tokens, place = [], 0
    while place < len(text) <= MAX_CHARACTERS:
        match = _TOKEN.match(text, place)
        if match is None:
            return []
        tokens.append(match[1])
        place = match.end()
    return tokens


def shown(value: Fraction) -> str:
    """Return a value as a whole number, or as a decimal number of `SHOWN_DIGITS` significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{SHOWN_DIGITS}g}"
    except OverflowError:
        return f"{value.numerator // value.denominator}"


class _Reader:
    """Reads an expression by recursive descent."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._next = tokens, 0

    @property
    def is_at_end(self) -> bool:
        return self._next == len(self._tokens)

    def sum(self, depth: int) -> Fraction:
        """Read terms between + and -."""
        return self._joined(_SUMS, self._product, depth)

    def _product(self, depth: int) -> Fraction:
        return self._joined(_PRODUCTS, self._factor, depth)

    def _joined(self, signs: Mapping[str, Callable[[Fraction, Fraction], Fraction]],
                operand: Callable[[int], Fraction], depth: int) -> Fraction:
        value = operand(depth)
        while not self.is_at_end and self._tokens[self._next] in signs:
            sign = signs[self._taken()]
            value = sign(value, operand(depth))
        return value

    def _factor(self, depth: int) -> Fraction:
        if self.is_at_end or depth > MAX_DEPTH:
            raise _NoExpression
        token = self._taken()
        if token in _SUMS:
            value = self._factor(depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self.sum(depth + 1)
            if self.is_at_end or self._taken() != ")":
                raise _NoExpression
            return value
        if token in ("*", "/", ")"):
            raise _NoExpression
        return Fraction(token)

    def _taken(self) -> str:
        self._next += 1
        return self._tokens[self._next - 1]
