"""Whether an answer is a JSON object with the keys that it must have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NoReturn

from pydantic import Field

from tidewheel.rewards.scoring.base import Reward, Sample, Scores
from tidewheel.versions import Version

JsonType = Literal["string", "integer", "number", "boolean", "array", "object", "null", "any"]
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),), "any": (str, int, float, bool, list, dict, type(None))}
_FENCE = "```"
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


class JsonObject(Reward):
    """1 if the answer is one JSON object (RFC 8259: no NaN) with all required keys, else 0."""

    VERSION: ClassVar[Version | None] = Version("reward_json_object")

    required: Mapping[str, JsonType] = Field(default_factory=dict)
    """Keys that the object must have, with the type of each value. An integer has no fraction and no exponent."""
    extra_keys: bool = True
    """Whether other keys may be there."""
    fenced: bool = False
    """Whether the answer may be one Markdown block between lines of ```."""
    max_depth: int = Field(default=64, ge=1, le=200)
    """Largest nesting depth of arrays and objects; a deeper answer scores 0."""

    def score(self, batch: Sequence[Sample]) -> Scores:
        """Parse each answer."""
        return Scores([float(self._is_valid(sample.answer)) for sample in batch])

    def _is_valid(self, answer: str) -> bool:
        text = without_fence(answer) if self.fenced else answer.strip(" \t\n\r")
        if depth_of(text) > self.max_depth:  # the parser's own limit depends on who calls it
            return False
        try:  # zeros stand for numbers: converting long ones takes quadratic time, and only the type is asked for
            value = json.loads(text, parse_int=lambda _: 0, parse_float=lambda _: 0.0, parse_constant=no_constant)
        except ValueError:
            return False
        if not isinstance(value, dict) or not (self.extra_keys or value.keys() <= self.required.keys()):
            return False
        return all(name in value and type(value[name]) in _TYPES[kind] for name, kind in self.required.items())


def without_fence(answer: str) -> str:
    """Return the text of an answer that is one Markdown block; any other answer without white space at its ends."""
    text = answer.strip(" \t\n\r")
    if text.startswith(_FENCE) and text.endswith(_FENCE):
        return text.removesuffix(_FENCE).partition("\n")[2]
    return text


def depth_of(text: str) -> int:
    """Return the nesting depth of arrays and objects in a text, also if it is no JSON."""
    depth = deepest = 0
    for token in _TOKEN.finditer(text):
        first = token.group()[0]
        depth += (first in "[{") - (first in "]}")
        deepest = max(deepest, depth)
    return deepest


def no_constant(name: str) -> NoReturn:
    """Refuse a number that is no JSON.

    Args:
        name: NaN, Infinity or -Infinity.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{name} is no JSON")
