"""Whether an answer is JSON that a schema describes (https://json-schema.org, draft 2020-12)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

import pydantic
from pydantic import Field

from tidewheel.rewards.json_object import depth_of, no_constant, without_fence
from tidewheel.rewards.scoring.base import Reward, Sample, Scores
from tidewheel.versions import Version


class JsonSchema(Reward):
    """1 if the answer is one JSON value (RFC 8259: no NaN) that the schema describes, else 0."""

    VERSION: ClassVar[Version | None] = Version("reward_json_schema")

    definition: Mapping[str, Any]
    """The schema. References stay inside it, and patterns are RE2's, without backreferences and look-around."""
    fenced: bool = False
    """Whether the answer may be one Markdown block between lines of ```."""
    max_depth: int = Field(default=64, ge=1, le=100)
    """Largest nesting depth of arrays and objects; a deeper answer scores 0."""

    @pydantic.model_validator(mode="after")
    def _is_schema(self) -> Self:
        import jsonschema
        import pyarrow as pa

        try:
            jsonschema.Draft202012Validator.check_schema(dict(self.definition))
            for pattern in _patterns(self.definition):
                _matches(pattern, "")
        except jsonschema.SchemaError as error:
            place = "/".join(map(str, error.absolute_path))
            raise ValueError(f"definition: no JSON schema: {error.message}{' in ' + place if place else ''}") from None
        except pa.ArrowInvalid as error:
            raise ValueError(f"definition: {error}; RE2 has no backreferences and no look-around") from None
        if any(not reference.startswith("#") for reference in _values(self.definition, "$ref")):
            raise ValueError("definition: a $ref must begin with #: nothing is fetched from elsewhere")
        return self

    @cached_property
    def _validator(self) -> Any:
        import jsonschema
        import referencing

        own = {"pattern": _pattern, "patternProperties": _pattern_properties, "uniqueItems": _unique_items}
        validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, own)
        return validator(dict(self.definition), registry=referencing.Registry())

    def score(self, batch: Sequence[Sample]) -> Scores:
        """Parse and validate each answer."""
        return Scores([float(self._is_valid(sample.answer)) for sample in batch])

    def _is_valid(self, answer: str) -> bool:
        text = without_fence(answer) if self.fenced else answer.strip(" \t\n\r")
        if depth_of(text) > self.max_depth:
            return False
        try:
            value = json.loads(text, parse_constant=no_constant)
        except ValueError:
            return False
        return bool(self._validator.is_valid(value))


def _matches(pattern: str, text: str) -> bool:
    """Return whether a pattern is found in a text, in time proportional to its length; Python's `re` has no bound."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return bool(pc.match_substring_regex(pa.array([text], pa.large_string()), pattern)[0].as_py())
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell out
        return False


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    import jsonschema

    if isinstance(instance, str) and not _matches(pattern, instance):
        yield jsonschema.ValidationError("does not match the pattern")


def _pattern_properties(validator: Any, properties: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, dict):
        for pattern, inner in properties.items():
            for key, value in instance.items():
                if _matches(pattern, key):
                    yield from validator.descend(value, inner, path=key, schema_path=pattern)


def _unique_items(validator: Any, unique: bool, instance: Any, schema: Any) -> Iterator[Any]:
    """Compare items by their texts: comparing each with each takes quadratic time."""
    import jsonschema

    if unique and isinstance(instance, list) and len({_normal(item) for item in instance}) < len(instance):
        yield jsonschema.ValidationError("has equal items")


def _normal(value: Any) -> str:
    """Return one text for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list):
        return f"[{','.join(map(_normal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{json.dumps(key)}:{_normal(item)}' for key, item in value.items()))}}}"
    return json.dumps(value)


def _patterns(schema: Any) -> Iterator[str]:
    yield from _values(schema, "pattern")
    for properties in _values(schema, "patternProperties", dict):
        yield from properties


def _values(schema: Any, keyword: str, kind: type = str) -> Iterator[Any]:
    """Yield the values of a keyword anywhere in a schema."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get(keyword), kind):
            yield schema[keyword]
        for value in schema.values():
            yield from _values(value, keyword, kind)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from _values(value, keyword, kind)
