"""One record of a run's commit log: what it holds, and the check of the JSON that storage returns."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tidewheel.lease import Holder

T = TypeVar("T")

VALUE_CHARACTERS = 60
"""Characters of a wrong value in an error."""


@dataclass(frozen=True)
class Record:
    """One record of the log. The newest one is the state of the run."""

    number: int
    """Number of the record's slot."""
    epoch: int
    """Number of earlier owners."""
    kind: str
    """The operation: take_over, commit, retire or release."""
    owner: Holder
    """Driver that owns the run."""
    since: float
    """Unix seconds of the owner's take-over."""
    time: float
    """Unix seconds of this record."""
    generation: int = -1
    """Worker group of the newest commit; -1 before the first."""
    checkpoints: tuple[str, ...] = ()
    """Names of the committed checkpoints, in commit order."""
    released: bool = False
    """Whether the owner has ended and released the run."""
    conditional: bool = True
    """Whether slots are taken by conditional creates."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Record:
        """Return the record with these JSON values, without fields that a later release added.

        Raises:
            ValueError: a field is missing or has a wrong type; the message names it.
        """
        return checked(_RECORD, values)

    def values(self) -> dict[str, Any]:
        """Return the JSON values of the record, without the number of its slot."""
        return {name: value for name, value in asdict(self).items() if name != "number"}


_RECORD = TypeAdapter(Record)


def checked(adapter: TypeAdapter[T], values: dict[str, Any]) -> T:
    """Return JSON values as the type of `adapter`.

    Args:
        adapter: of the type.
        values: the values; fields that the type does not have are ignored.

    Raises:
        ValueError: a field is missing or has a wrong type; the message names it.
    """
    try:
        return adapter.validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        raise ValueError(f"it has no field {field!r}")
    value = repr(problem["input"])[:VALUE_CHARACTERS]
    raise ValueError(f"its field {field!r} is {value}: {problem['msg'][0].lower()}{problem['msg'][1:]}")
