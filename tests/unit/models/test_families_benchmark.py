"""The benchmark that trains every family compares like with like, and fails when a family does."""

from __future__ import annotations

import pytest

from tests.benchmarks.families import (
    BASE,
    LENGTH,
    ONE,
    REACH,
    TOLERANCE,
    VOCABULARY,
    Measured,
    dense_counterpart,
    flops,
    settings,
    shapes,
)
from tests.every import every
from tidewheel.models import families
from tidewheel.parts import name_of

MODELS = shapes()


def test_every_family_is_trained_and_every_mixture_has_a_dense_counterpart():
    assert {name_of(type(model)) for model in MODELS.values()} == set(families.KIND.built_in())
    mixtures = [name for name, model in MODELS.items() if model.layer_costs(0).experts and ONE not in name]
    assert len(mixtures) == 5
    assert {dense_counterpart(name) for name in mixtures} <= set(MODELS)


@every(MODELS)
def test_a_token_costs_every_model_as_many_flops(name: str):
    model = MODELS[name]
    assert flops(model) == pytest.approx(flops(MODELS[BASE]), rel=TOLERANCE)
    assert model.vocabulary_size == VOCABULARY
    assert model.max_sequence_length >= LENGTH


def test_all_models_read_the_same_tokens_with_the_same_settings():
    made = [settings(model, name, "data", "output", 10) for name, model in MODELS.items()]
    assert len({run.run_uri for run in made}) == len(made)
    others = [{key: value for key, value in run.canonical().items() if key not in ("run", "model")} for run in made]
    assert all(other == others[0] for other in others)


LOSSES = {BASE: 3.9, "mixtral": 3.8, "olmoe": 3.8, "olmoe" + ONE: 3.9}


FLOPS = {name: flops(MODELS[name]) for name in LOSSES}


def faults(**changed: float) -> list[str]:
    return Measured(LOSSES | changed, FLOPS, 4.2, {"mixtral": 1.4}).faults()


@pytest.mark.parametrize(("changed", "said"), [
    ({"olmoe": 3.95}, "dense counterpart"), ({"mixtral": 3.95}, "dense counterpart"),
    ({"mixtral": 3.9 + 1.5 * REACH}, "above Llama's"), ({"llama": 4.3}, "not below the bigram model")])
def test_a_family_that_lags_is_reported(changed: dict[str, float], said: str):
    assert faults() == []
    assert any(said in fault for fault in faults(**changed))


def test_unequal_flops_and_idle_experts_are_reported():
    (fault,) = Measured(LOSSES, dict.fromkeys(LOSSES, 100) | {"olmoe": 103}, 4.2, {}).faults()
    assert "FLOPs a token are +3.0%" in fault
    (fault,) = Measured(LOSSES, FLOPS, 4.2, {"olmoe": 3.7}).faults()
    assert "3.70 times the mean" in fault
