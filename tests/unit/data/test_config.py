"""Settings of a recipe: the forms in which it can be written, and the errors for mistakes."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest

from tidewheel.config import build, load
from tidewheel.data.config import PipelineConfig
from tidewheel.errors import ConfigError

DEMO = Path(__file__).parents[3] / "pipelines" / "demo.yaml"
VALUES = {
    "read": {"paths": ["corpus/*.jsonl*"]},
    "steps": [{"filter": {"gopher_quality": {}}}, {"dedup_exact": {}}, {"dedup_near": {"min_jaccard": 0.8}},
              {"decontaminate": {"evals": ["evals/*.jsonl"]}}, {"tokenize": {"train": {"vocabulary_size": 2048}}},
              {"pack": {"sequence_length": 256}}],
}


def changed(place, value):
    values = copy.deepcopy(VALUES)
    values["steps"][place] = value
    return values


TOKENIZE = {"tokenize": {"train": {}}}


def ending(*steps):
    return {"read": {"paths": ["*"]}, "steps": list(steps)}


@pytest.mark.parametrize(("steps", "formats"), [
    ([], ["parquet"]), (["dedup_exact"], ["parquet"]), (["write"], ["parquet"]), ([TOKENIZE], ["megatron"]),
    ([TOKENIZE, "write"], ["megatron"]), ([TOKENIZE, "pack"], None), ([TOKENIZE, "pack", "write"], ["parquet"]),
    ([{"write": {"formats": ["jsonl", "mds"]}}], ["jsonl", "mds"]),
    ([TOKENIZE, "pack", {"write": {"formats": ["megatron", "arrow"]}}], ["megatron", "arrow"])])
def test_a_recipe_can_end_after_any_step(steps, formats):
    config = build(PipelineConfig, ending(*steps))
    assert (config.product and list(config.product.formats)) == formats
    assert build(PipelineConfig, config.canonical()).recipe_hash() == config.recipe_hash()


def test_known_recipes_keep_their_hashes():
    assert load(PipelineConfig, DEMO).recipe_hash() == "8b8094544668619d"


def test_conversations_cannot_be_written_as_megatron():
    chat = {"paths": ["*"], "kind": "chat"}
    with pytest.raises(ConfigError, match="no loss mask"):
        build(PipelineConfig, {**ending({"tokenize": {"file": "t.json"}}), "read": chat})


def test_the_demo_recipe_loads_with_its_defaults():
    config = load(PipelineConfig, DEMO)
    assert [step.kind for step in config.steps] == ["filter", "dedup_exact", "dedup_near", "decontaminate", "tokenize",
                                                    "pack"]
    assert config.step("dedup_near").num_permutations == 112
    assert list(config.canonical()["steps"][0]["filter"]) == ["gopher_quality", "annotate"]
    assert config.step("tokenize").train.vocabulary_size == 2048


def test_overrides_reach_into_steps():
    config = load(PipelineConfig, DEMO, ["steps.2.dedup_near.min_jaccard=0.9", "seed=7"])
    assert config.step("dedup_near").min_jaccard == 0.9
    assert config.seed == 7


@pytest.mark.parametrize("form", ["dedup_exact", {"dedup_exact": None}, {"dedup_exact": {}}])
def test_a_step_without_settings_may_be_written_short(form):
    assert build(PipelineConfig, changed(1, form)).recipe_hash() == build(PipelineConfig, VALUES).recipe_hash()


def test_equal_recipes_in_other_words_have_one_hash():
    config = build(PipelineConfig, VALUES)
    spelled_out = build(PipelineConfig, config.canonical())
    assert spelled_out == config
    assert spelled_out.recipe_hash() == config.recipe_hash()
    assert build(PipelineConfig, {**VALUES, "seed": 1}).recipe_hash() != config.recipe_hash()


def test_the_sdk_builds_the_same_recipe():
    from tidewheel.workflow.pipeline import Pipeline

    made = (Pipeline("pipeline").read("corpus/*.jsonl*").filter(_gopher()).dedup_exact().dedup_near(min_jaccard=0.8)
            .decontaminate("evals/*.jsonl").tokenize(train={"vocabulary_size": 2048}).pack(sequence_length=256))
    assert made.recipe_hash() == build(PipelineConfig, VALUES).recipe_hash()


def _gopher():
    from tidewheel import filters

    return filters.gopher_quality()


@pytest.mark.parametrize(("values", "told"), [
    (changed(2, {"dedup_nera": {}}), "did you mean 'dedup_near'"),
    (changed(2, "dedup_neer"), "did you mean 'dedup_near'"),
    (changed(0, {"filter": {"gopher_qualty": {}}}), "did you mean 'gopher_quality'"),
    (changed(2, {"dedup_near": {"min_jacard": 0.8}}), "did you mean 'min_jaccard'"),
    (changed(5, {"pack": {"sequence_lenght": 256}}), "did you mean 'sequence_length'"),
    ({**VALUES, "max_bad_fractoin": 0.1}, "did you mean 'max_bad_fraction'"),
    (changed(1, {"dedup_exact": {}, "dedup_near": {}}), "exactly one of"),
    (changed(1, {}), "none given"),
    (changed(0, {"filter": {}}), "at least one filter"),
    (changed(4, {"tokenize": {}}), "either train or file"),
    (changed(4, {"tokenize": {"train": {}, "file": "t.json"}}), "either train or file"),
    (changed(4, {"dedup_exact": {}}), "pack needs tokenize before it"),
    (changed(0, {"dedup_exact": {}}), "dedup_exact is given 2 times"),
    (ending("write", TOKENIZE), "the last steps are tokenize, pack, write, in this order"),
    (ending(TOKENIZE, "dedup_exact", "pack"), "the last steps are tokenize, pack, write, in this order"),
    (ending(TOKENIZE, {"write": {"formats": ["parquet"]}}), "no step uses the tokens"),
    (ending({"write": {"formats": ["megatron"]}}), "tokenize must come before it"),
    (ending({"write": {"formats": ["mds", "mds"]}}), "mds is given twice"),
    (ending({"write": {"formats": ["csv"]}}), "write.formats"),
    ({**VALUES, "partitions": 0}, "write auto, or a number"),
    ({**VALUES, "read": {"paths": []}}, "read.paths"),
    ({"steps": VALUES["steps"]}, "read"),
    (changed(2, {"dedup_near": {"min_jaccard": 1.5}}), "min_jaccard"),
    (changed(3, {"decontaminate": {"evals": ["e/"], "action": "remove"}}), "decontaminate.action"),
    (changed(3, {"decontaminate": {"evals": ["e/"], "fail_above": 2}}), "fail_above"),
])
def test_errors_name_the_setting(values, told):
    with pytest.raises(ConfigError) as error:
        build(PipelineConfig, values, where="recipe.yaml")
    assert told in str(error.value)
    assert "recipe.yaml" in str(error.value)


def test_checking_a_recipe_imports_nothing_heavy():
    code = ("import sys; from tidewheel.config import load; from tidewheel.data.config import PipelineConfig; "
            f"load(PipelineConfig, {str(DEMO)!r}); "
            "heavy = {'ray', 'torch', 'numba', 'tokenizers', 'matplotlib', 's3fs'} & set(sys.modules); "
            "sys.exit(f'imported: {heavy}' if heavy else 0)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
