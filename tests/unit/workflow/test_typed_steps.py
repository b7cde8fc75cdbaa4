"""The keyword arguments of `tw.Pipeline` are the settings of its steps, name by name and type by type."""

from __future__ import annotations

import inspect
import re

import pytest

import tidewheel as tw
from tidewheel.config import Config
from tidewheel.data.config import (
    DecontaminateStep,
    DedupExactStep,
    DedupLinesStep,
    DedupNearStep,
    DedupUrlStep,
    PackStep,
    PipelineConfig,
    TokenizeStep,
    WriteStep,
)
from tidewheel.data.read_config import ReadConfig
from tidewheel.workflow import step_settings

METHODS: dict[str, tuple[str, type[Config], set[str]]] = {
    "set": ("PipelineOptions", PipelineConfig, {"name", "read", "steps"}),
    "read": ("ReadSettings", ReadConfig, {"paths"}),
    "dedup_near": ("DedupNearSettings", DedupNearStep, set()),
    "dedup_lines": ("DedupLinesSettings", DedupLinesStep, set()),
    "decontaminate": ("DecontaminateSettings", DecontaminateStep, {"evals"}),
    "tokenize": ("TokenizeSettings", TokenizeStep, {"file"}),
    "pack": ("PackSettings", PackStep, set()),
    "write": ("WriteSettings", WriteStep, {"formats"}),
}
"""Each method with the dictionary of its keyword arguments, the configuration of its step, and the settings that the
method takes otherwise."""

#: Types that Python offers in another way than a recipe does; both sides are written as in their source.
WIDER = {
    "tuple[str, ...]": "Sequence[str]", "dict[str, int]": "Mapping[str, int]",
    "PlacementConfig": "Settings | PlacementConfig",
    "CodeConfig": "Settings | CodeConfig", "TrainTokenizer | None": "Settings | TrainTokenizer | None",
    "datetime | None": "datetime | str | None", "str | pydantic.InstanceOf[Reader]": "str | Settings | Reader",
}


def source_types(cls: type) -> dict[str, str]:
    """Return the annotation of each field, as written in the class's source."""
    return {name: getattr(annotation, "__forward_arg__", annotation)
            for name, annotation in inspect.get_annotations(cls).items()}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_the_settings_of_its_step(method: str) -> None:
    settings, config, positional = METHODS[method]
    arguments = inspect.signature(getattr(tw.Pipeline, method)).parameters.values()
    assert f"Unpack[{settings}]" in {str(argument.annotation) for argument in arguments}
    declared = source_types(getattr(step_settings, settings))
    expected = {name: WIDER.get(text, text) for name, text in source_types(config).items() if name not in positional}
    if method == "read":
        expected["text"] = "str | Settings | TextTemplate"
    assert declared == expected


@pytest.mark.parametrize("step", [DedupUrlStep, DedupExactStep])
def test_steps_without_settings_take_none(step: type[Config]) -> None:
    assert not step.model_fields


def public_functions() -> dict[str, object]:
    """Return the functions of the SDK, and the methods of its classes that are defined there."""
    functions: dict[str, object] = {}
    for name in tw.__all__:
        value = getattr(tw, name)
        if inspect.isclass(value):
            for key in vars(value):
                method = getattr(value, key)
                own = key == "__init__" or not key.startswith(("_", "model_"))
                if own and callable(method):
                    functions[f"{name}.{key}"] = method
        elif callable(value):
            functions[name] = value
    return functions


def test_no_public_signature_says_any() -> None:
    functions = public_functions()
    assert "Train.__init__" in functions
    del functions["Store.read_json"]  # JSON of any shape, typed as `json.loads` is
    del functions["Environment.reset"], functions["Environment.step"]  # the state is of a type of the environment's own
    loose = []
    for name, function in functions.items():
        annotations = inspect.get_annotations(function)
        loose += [f"{name}: {key}" for key, annotation in annotations.items() if re.search(r"\bAny\b", str(annotation))]
    assert not loose
