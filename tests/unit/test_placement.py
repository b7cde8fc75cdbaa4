"""Placement selectors: their text, the nodes they match, Ray's check, and that no result depends on them."""

from __future__ import annotations

import pytest
from ray._private.label_utils import validate_label_selector

from tidewheel.config import build, load
from tidewheel.data.config import PipelineConfig
from tidewheel.errors import ConfigError
from tidewheel.placement import GROUP_LABEL, MARKET_LABEL, NOT_SPOT, PlacementConfig, is_spot, matches, with_labels
from tidewheel.train.config import TrainConfig
from tidewheel.workflow.kinds import KINDS

SPOT = {GROUP_LABEL: "gpu-spot", MARKET_LABEL: "spot"}
STAYS = {GROUP_LABEL: "gpu", MARKET_LABEL: "on-demand", "team": "a"}
BARE: dict[str, str] = {}


@pytest.mark.parametrize(("placement", "selector"), [
    ({}, {}),
    ({"groups": ["gpu"]}, {GROUP_LABEL: "gpu"}),
    ({"groups": ["gpu", "gpu-spot"], "labels": {"team": "a"}}, {GROUP_LABEL: "in(gpu,gpu-spot)", "team": "a"}),
    ({"labels": {MARKET_LABEL: "!spot", "a.b/c": "!in(x, y)"}}, {MARKET_LABEL: "!spot", "a.b/c": "!in(x,y)"}),
])
def test_a_placement_becomes_a_selector(placement, selector):
    result = PlacementConfig.model_validate(placement).selector
    assert result == selector
    assert validate_label_selector(result) is None  # Ray's own check: None means valid


@pytest.mark.parametrize(("selector", "nodes"), [
    ({}, (SPOT, STAYS, BARE)),
    ({GROUP_LABEL: "gpu"}, (STAYS,)),
    ({GROUP_LABEL: "in(gpu,gpu-spot)"}, (SPOT, STAYS)),
    ({GROUP_LABEL: "in(gpu,data)"}, (STAYS,)),
    (NOT_SPOT, (STAYS, BARE)),
    ({GROUP_LABEL: "!in(gpu,data)"}, (SPOT, BARE)),
    ({GROUP_LABEL: "in(gpu,gpu-spot)", **NOT_SPOT}, (STAYS,)),
    ({GROUP_LABEL: "gpu", "team": "b"}, ()),
])
def test_a_selector_matches_labels(selector, nodes):
    assert [labels for labels in (SPOT, STAYS, BARE) if matches(selector, labels)] == list(nodes)


def test_only_nodes_with_the_spot_label_are_spot():
    assert [is_spot(labels) for labels in (SPOT, STAYS, BARE)] == [True, False, False]


def test_a_selector_is_shown_as_text():
    assert "no node" + with_labels({GROUP_LABEL: "gpu", "team": "a"}) == f"no node with {GROUP_LABEL}=gpu, team=a"
    assert with_labels({}) == ""


@pytest.mark.parametrize(("placement", "message"), [
    ({"groups": ["a b"]}, "not a valid name of a node group"),
    ({"labels": {"a b": "c"}}, "not a valid name of a label"),
    ({"labels": {"a/b/c": "d"}}, "not a valid name of a label"),
    ({"labels": {"a": "in()"}}, "not a condition for label a"),
    ({"labels": {"a": "!!b"}}, "not a condition for label a"),
    ({"groups": ["a"], "labels": {GROUP_LABEL: "b"}}, "leave one out"),
    ({"group": ["a"]}, "did you mean 'groups'"),
])
def test_invalid_placements_are_refused(placement, message):
    with pytest.raises(ConfigError, match=message):
        build(PlacementConfig, placement)


def test_recipe_hashes_do_not_depend_on_placement():
    anywhere, placed = (load(PipelineConfig, "pipelines/demo.yaml", overrides)
                   for overrides in ((), ["placement.groups=[data]"]))
    assert anywhere.canonical() != placed.canonical()
    assert anywhere.recipe_hash() == placed.recipe_hash()
    kind = KINDS["pipeline"]
    assert kind.recipe({"name": "p", "config": anywhere.canonical()}) == kind.recipe(
        {"name": "p", "config": placed.canonical()})
    runs = [load(TrainConfig, "jobs/configs/demo.yaml", overrides)
            for overrides in ((), ["elastic.placement.groups=[gpu, gpu-spot]"])]
    assert runs[1].elastic.placement.selector == {GROUP_LABEL: "in(gpu,gpu-spot)"}
    assert runs[0].recipe_hash() == runs[1].recipe_hash()
    assert KINDS["train"].recipe({"name": "t", "config": runs[0].canonical()}) == KINDS["train"].recipe(
        {"name": "t", "config": runs[1].canonical()})
