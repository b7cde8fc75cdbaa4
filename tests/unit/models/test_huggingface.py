"""Tests of import and export against transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from tests.every import every
from tests.oracles import LLAMA3, ORACLES, VOCABULARY, WIDTHS, imported, largest_difference, packed
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.models import families, huggingface
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Model
from tidewheel.parts import name_of
from tidewheel.storage import LocalStore, store

LENGTH = 48
BOUND = 1e-5
"""Largest difference of a logit in fp32."""


def theirs(name: str) -> transformers.PreTrainedModel:
    return ORACLES[name].build()


@torch.no_grad()
def logits_of(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, torch.zeros_like(tokens))


def same_weights(oracle: transformers.PreTrainedModel, again: transformers.PreTrainedModel) -> None:
    """Check that two models of transformers have the same class, names and weights."""
    assert type(again) is type(oracle)
    for (key, value), (other, back) in zip(oracle.state_dict().items(), again.state_dict().items(), strict=True):
        assert key == other
        assert torch.equal(value, back), key


@pytest.mark.parametrize("name", ORACLES)
def test_logits_equal_those_of_transformers_and_a_round_trip_is_exact(name: str, tmp_path: Path):
    oracle = theirs(name)
    oracle.save_pretrained(tmp_path / "theirs")
    model = imported(tmp_path / "theirs")
    assert name_of(type(model.config)) == ORACLES[name].family
    assert largest_difference(model, oracle) < BOUND

    weights = model.state_dict()
    huggingface.write(store(tmp_path / "ours"), model.config, VOCABULARY,
                      lambda names: {item: weights[item] for item in names}, shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    same_weights(oracle, again)
    tokens, _, _ = packed()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, oracle(tokens).logits)
    twice = imported(tmp_path / "ours")
    assert settings_of(twice.config) == settings_of(model.config)
    for key, value in twice.state_dict().items():
        assert torch.equal(value, weights[key]), key


def settings_of(config: Model) -> dict[str, Any]:
    """Return the content of config.json without the standard deviation of initial weights, which is not imported."""
    values = json.loads(json.dumps(huggingface.to_config(config, 1024, eos=7)))
    return {name: value for name, value in values.items() if name != "initializer_range"}


@every([(family, preset) for family in families.KIND.built_in() for preset in families.KIND.find(family).PRESETS])
def test_config_json_of_every_preset_survives_a_round_trip(case: tuple[str, str]):
    family, preset = case
    config = families.KIND.build(family, {"preset": preset})
    back, vocabulary_size = huggingface.from_config(settings_of(config), preset)
    assert vocabulary_size == 1024
    assert type(back) is type(config)
    assert settings_of(back) == settings_of(config)
    same = ("dim", "num_layers", "num_heads", "kv_heads", "head_width", "ffn_width", "rope_theta", "rope_scaling",
            "tie_embeddings", "max_sequence_length")
    assert [getattr(back, name) for name in same] == [getattr(config, name) for name in same]
    assert [back.window(layer) for layer in range(12)] == [config.window(layer) for layer in range(12)]
    assert [back.rope(layer) for layer in range(12)] == [config.rope(layer) for layer in range(12)]


def test_every_family_that_can_be_imported_has_an_oracle():
    for name in families.KIND.built_in():
        types = families.KIND.find(name).MODEL_TYPES
        assert len([oracle for oracle in ORACLES.values() if oracle.family == name]) >= len(types), name


def test_the_older_form_of_rope_settings_is_read():
    """Read the form of Llama-3.1-8B's config.json."""
    values = {**WIDTHS, "model_type": "llama", "rope_theta": 5e5,
              "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}}
    config, _ = huggingface.from_config(values, "config.json")
    assert (config.rope_theta, config.rope_scaling.factor, config.rope_scaling.original_length) == (5e5, 8.0, 8192)


@every([
    ({"model_type": "mamba"}, "model_type 'mamba' is not known"),
    ({"model_type": "gemma"}, "nearest that is known is 'gemma2'"),
    ({"attention_bias": True}, "attention_bias: True"),
    ({"hidden_act": "relu2"}, "hidden_act: 'relu2' (only 'silu')"),
    ({"residual_multiplier": 0.22}, "not known: residual_multiplier: 0.22"),
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type: 'longrope'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mystery": 3}}, "mystery: 3 of rope_type 'yarn'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    ({"hidden_size": None}, "not complete"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "greater than or equal to 1"),
])
def test_variants_that_compute_differently_are_refused_with_what_is_not_known(case: tuple[dict[str, Any], str]):
    changes, says = case
    with pytest.raises(ConfigError, match=re.escape(says)):
        huggingface.from_config({**WIDTHS, "model_type": "llama", **changes}, "config.json")


@every([({"use_cache": False}, {}), ({"attention_dropout": 0.1, "torch_dtype": "bfloat16"}, {}),
        ({"mystery": False, "quantization_config": None}, {})])
def test_settings_that_change_no_logit_are_passed_over(case: tuple[dict[str, Any], Any]):
    changes, _ = case
    plain, _ = huggingface.from_config({**WIDTHS, "model_type": "llama"}, "config.json")
    assert huggingface.from_config({**WIDTHS, "model_type": "llama", **changes}, "config.json")[0] == plain


def test_a_checkpoint_of_a_model_without_output_is_read(tmp_path: Path):
    """Its names lack the prefix, as those of openai-community/gpt2, which also has the buffers of old masks."""
    oracle = theirs("gpt2")
    oracle.save_pretrained(tmp_path)
    whole = imported(tmp_path).state_dict()
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): value for name, value in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, path)
    for name, value in imported(tmp_path).state_dict().items():
        assert torch.equal(value, whole[name]), name


def test_weights_that_do_not_fit_are_refused(tmp_path: Path):
    theirs("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    good = safetensors.torch.load_file(path)

    def refused(tensors: dict[str, torch.Tensor], says: str) -> None:
        safetensors.torch.save_file(tensors, path, {"format": "pt"})
        with pytest.raises(CheckpointError, match=says):
            imported(tmp_path)

    refused({**good, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, "q_proj.bias is not a known weight")
    refused({**good, "model.norm.weight": torch.zeros(33)}, r"model.norm.weight is \[33\], config.json says \[32\]")
    refused({name: tensor for name, tensor in good.items() if name != "lm_head.weight"}, "1 weights are missing, lm_h")
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        imported(tmp_path)
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are not loaded"):
        imported(tmp_path)


def test_a_model_in_remote_storage_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    theirs("llama").save_pretrained(tmp_path)
    own_state = imported(tmp_path).state_dict()
    monkeypatch.setattr(LocalStore, "local_path", lambda self, key: None)  # as of an object store
    for name, value in imported(tmp_path).state_dict().items():
        assert torch.equal(value, own_state[name])


def test_padding_the_vocabulary_keeps_logits_and_bounds_the_probability_of_new_tokens(tmp_path: Path):
    theirs("llama").save_pretrained(tmp_path)
    model = imported(tmp_path)
    wide = Decoder(model.config, VOCABULARY + 32)
    wide.load_state_dict({name: huggingface.padded(value, VOCABULARY + 32) if value.shape[0] == VOCABULARY else value
                          for name, value in model.state_dict().items()})
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = logits_of(wide, tokens)
    torch.testing.assert_close(logits[..., :VOCABULARY], logits_of(model, tokens))
    assert logits.softmax(-1)[..., VOCABULARY:].sum(-1).max() <= 32 / (VOCABULARY + 32) + 1e-6
