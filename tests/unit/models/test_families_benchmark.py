"""The benchmark that trains every family compares like with like, and fails when a family does."""

from __future__ import annotations

import math
import re

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


def test_seeds_change_the_initial_values_alone():
    first, second = (settings(MODELS["olmoe"], "olmoe", "data", "output", 10, seed).canonical() for seed in (1, 2))
    assert {key for key in first if first[key] != second.get(key)} <= {"run", "seed"}
    assert first["data"]["seed"] == 1
    assert second["seed"] == 2


LOSSES = {BASE: [3.9, 3.88], "mixtral": [3.8, 3.79], "olmoe": [3.8, 3.81], "olmoe" + ONE: [3.9, 3.9]}
FLOPS = {name: flops(MODELS[name]) for name in LOSSES}


def faults(**changed: list[float]) -> list[str]:
    return Measured(LOSSES | changed, FLOPS, 4.2, {"mixtral": 1.4}).faults()


@pytest.mark.parametrize(("changed", "said"), [
    ({"olmoe": [3.97, 3.96]}, "olmoe: \\+0.065 ± 0.022 beside its dense counterpart is above 0"),
    ({"mixtral": [3.95, 3.97]}, "mixtral: .* beside its dense counterpart"),
    ({"mixtral": [3.9 + 1.5 * REACH] * 2}, "above Llama's"), ({"llama": [4.3, 4.3]}, "not below the bigram model")])
def test_a_family_that_lags_is_reported(changed: dict[str, list[float]], said: str):
    assert faults() == []
    assert any(re.match(f".*{said}", fault) for fault in faults(**changed))


def test_what_seeds_explain_is_no_fault_unless_all_mixtures_lag():
    noisy = {"olmoe": [4.0, 3.82], "olmoe" + ONE: [3.88, 3.92]}  # +0.12 and -0.1
    assert faults(**noisy) == []
    slow = {"olmoe": [3.92, 3.92], "mixtral": [3.94, 3.88]}  # +0.02, +0.02 and +0.04, 0
    assert faults(**slow) == [], "± 0.06 of each"
    many = Measured({BASE: [3.9] * 9, "mixtral": [3.94, 3.9, 3.92] * 3, "olmoe": [3.9, 3.94, 3.92] * 3,
                     "olmoe" + ONE: [3.91] * 9}, FLOPS, 4.2, {})
    assert many.distance("olmoe") == pytest.approx((0.01, 0.0122), abs=1e-4)
    (_, fault) = many.faults()
    assert fault == "all mixtures: +0.015 ± 0.009 beside their dense counterparts is above 0"


def test_the_interval_is_students_over_the_seeds_of_all_mixtures():
    distance, half = Measured(LOSSES, FLOPS, 4.2, {}).distance("olmoe")
    assert distance == pytest.approx(-0.095)
    spread = math.sqrt((2 * 0.005**2 + 2 * 0.005**2) / 2)  # distances -0.1, -0.09 and -0.1, -0.09
    assert half == pytest.approx(4.302653 * spread / math.sqrt(2)), "4.30 is Student's 97.5 % quantile of 2 degrees"


def test_unequal_flops_and_idle_experts_are_reported():
    (fault,) = Measured(LOSSES, dict.fromkeys(LOSSES, 100) | {"olmoe": 103}, 4.2, {}).faults()
    assert "FLOPs a token are +3.0%" in fault
    (fault,) = Measured(LOSSES, FLOPS, 4.2, {"olmoe": 3.7}).faults()
    assert "3.70 times the mean" in fault
