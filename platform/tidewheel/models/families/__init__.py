"""The built-in model families, one module each, and their registry. Nothing imports torch before a block is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from tidewheel.models.families.llama import Llama as Llama
from tidewheel.models.family import Model
from tidewheel.parts import Chosen, Kind

KIND = Kind("model family", Model, __name__, "tidewheel.models")
DEFAULT = "llama"
ChosenModel = Annotated[Model, Chosen(KIND, DEFAULT)]


def of_shape(values: Mapping[str, Any]) -> Model:
    """Return the model from the result of `Model.shape`.

    Raises:
        ConfigError: there is no such family.
        pydantic.ValidationError: a setting is unknown or has a wrong value.
    """
    settings = {name: value for name, value in values.items() if name != "kind"}
    return KIND.build(str(values.get("kind", DEFAULT)), settings)
