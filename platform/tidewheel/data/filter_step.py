"""Settings of the recipe's step `filter`."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic import model_serializer, model_validator
from pydantic_core import PydanticCustomError

from tidewheel.config import Config, below, problems_of, unknown_key
from tidewheel.data.filter import FILTERS, Filter
from tidewheel.errors import ConfigError
from tidewheel.parts import KIND, is_own, name_of

_PYTHON, _ANNOTATE = "python", "annotate"


class FilterStep(Config):
    """Filters, which judge each document by itself: settings by name, applied in the order of `Filter.ORDER`.

    A name is that of a built-in filter or of an installed package's, or `module:Class` of your own. `python:
    module:function` names a plain function.
    """

    filters: tuple[pydantic.InstanceOf[Filter], ...]
    """The filters. In a recipe each is a key of the step itself: `gopher_quality: {min_words: 60}`."""
    annotate: bool = False
    """Drop and edit nothing. Instead, write each document's statistics, and the reason for which it would be dropped,
    to `annotations/<stage>/*.parquet`, to choose thresholds from."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        values = expand_bare_names(values)
        if not isinstance(values, dict):
            return values
        settings_by_name = {str(name): {} if given is None else given for name, given in values.items()
                            if name not in (_PYTHON, _ANNOTATE)}
        if _PYTHON in values:
            if not isinstance(values[_PYTHON], str):
                raise ValueError("python: name one function, as in `python: my_filters:short`; give others as "
                                 "`my_filters:other: {}` beside it")
            settings_by_name[values[_PYTHON]] = {}
        if not settings_by_name:
            raise ValueError(f"name at least one filter: {', '.join(FILTERS.names())}")
        filters = [_filter(name, settings) for name, settings in settings_by_name.items()]
        filters.sort(key=lambda filter: (filter.ORDER, name_of(type(filter))))
        return {"filters": tuple(filters), **{name: values[name] for name in values if name == _ANNOTATE}}

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        return {**{name_of(type(filter)): filter.canonical() for filter in self.filters}, _ANNOTATE: self.annotate}

    def decisive(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, with the source of the user's own filters."""
        values: dict[str, Any] = {_ANNOTATE: True} if self.annotate else {}
        for filter in self.filters:
            settings = filter.decisive()
            values[settings.pop(KIND)] = settings
        return values


def _filter(name: str, settings: Any) -> Filter:
    """Return one filter of a step.

    Raises:
        pydantic.ValidationError: no filter has this name, or a setting is invalid; the error names the place.
    """
    if not is_own(name) and name not in FILTERS.names():
        raise unknown_key(name, (*FILTERS.names(), _ANNOTATE, _PYTHON), settings)
    if not isinstance(settings, dict):
        raise below(name, [{"type": "dict_type", "loc": (), "input": settings}])
    try:
        return FILTERS.build(name, settings)
    except ConfigError as error:  # its module is missing, or the name is not a filter
        problem = PydanticCustomError("no_filter", "{message}", {"message": f"{error.what}; {error.fix}"})
        raise below(name, [{"type": problem, "loc": (), "input": {}}]) from None
    except pydantic.ValidationError as error:
        raise below(name, problems_of(FILTERS.find(name), error)) from None


def expand_bare_names(values: Any) -> Any:
    """Return the settings of a step; `- dedup_exact` and `- dedup_exact:` mean `- dedup_exact: {}`."""
    if isinstance(values, str):
        return {values: {}}
    if isinstance(values, dict) and len(values) == 1:
        return {name: {} if value is None else value for name, value in values.items()}
    return values
