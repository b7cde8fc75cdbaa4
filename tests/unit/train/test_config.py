"""Tests of the training configuration: refused settings, and the settings in its hash."""

import pytest

from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.provenance import without_secrets
from tidewheel.train.config import TrainConfig


@pytest.mark.parametrize(("values", "says"), [
    ({"batch": {"global_sequences": 30}}, "nearest that is: 32"),
    ({"elastic": {"min_workers": 3, "max_workers": 2}}, "min_workers 3 is more than max_workers 2"),
    ({"elastic": {"min_workers": 3, "max_workers": 3}}, "from 3 to 3 divides batch.virtual_ranks 4"),
    ({"optimizer": {"betas": [0.9, 1.0]}}, "betas must be in"),
    ({"run": {"id": "../up"}}, "run.id"),
    ({"model": {"attention": "varlen"}}, "but precision is fp32; nearest legal choice: flex"),
    ({"stepz": 3}, "did you mean 'steps'"),
    ({"model": {"dimm": 3}}, "did you mean 'dim'"),
])
def test_mistakes_are_named(values: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        build(TrainConfig, values)


def test_the_recipe_does_not_depend_on_the_cluster():
    base = build(TrainConfig, {})
    same = build(TrainConfig, {"run": {"id": "other"}, "elastic": {"max_workers": 2}, "checkpoint": {"every_steps": 7},
                               "data": {"uri": "/somewhere/else", "prefetch": 5}, "model": {"attention": "masked"},
                               "memory": {"activation_checkpointing": "full"}, "loss": {"chunk_tokens": 64}})
    assert base.recipe_hash() == same.recipe_hash()
    assert base.recipe_hash() != build(TrainConfig, {"data": {"seed": 1}}).recipe_hash()
    assert base.recipe_hash() != build(TrainConfig, {"steps": 101}).recipe_hash()
    assert base.recipe_hash() != build(TrainConfig, {"loss": {"z_loss": 1e-4}}).recipe_hash()


def test_a_preset_is_spelled_out():
    config = build(TrainConfig, {"model": {"preset": "debug", "dim": 128}})
    assert (config.model.dim, config.model.num_kv_heads) == (128, 2)
    assert build(TrainConfig, config.canonical()) == config.model_copy(
        update={"model": config.model.model_copy(update={"preset": ""})})


def test_secrets_stay_out_of_run_json():
    values = {"uri": "s3://key:secret@bucket/path", "nested": {"plain": "s3://bucket/a@b"}, "steps": 3,
              "paths": ["s3://key:secret@bucket/a", {"b": "https://me:secret@host/b"}]}
    assert without_secrets(values) == {
        "uri": "s3://bucket/path", "nested": {"plain": "s3://bucket/a@b"}, "steps": 3,
        "paths": ["s3://bucket/a", {"b": "https://host/b"}]}
