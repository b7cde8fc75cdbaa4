"""Tests of import and export against transformers."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.models import huggingface
from tidewheel.models.decoder import Decoder
from tidewheel.models.families import Llama
from tidewheel.storage import LocalStore, store

VOCABULARY, LENGTH = 96, 48
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
WIDTHS = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
          "rms_norm_eps": 1e-5, "initializer_range": 0.2}
MODELS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "head_dim": 8, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e5}}),
    "llama_scaled": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 1000.0}}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6}}),
}


def theirs(name: str) -> transformers.PreTrainedModel:
    family, changes = MODELS[name]
    torch.manual_seed(0)
    kinds = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
             "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)}
    configuration, model = kinds[family]
    made = model(configuration(**{**WIDTHS, **changes})).eval()
    with torch.no_grad():  # norms are 1 at first, which would hide one in the wrong place
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return made


def ours(folder: Path) -> Decoder:
    folder_store = store(folder)
    config, vocabulary_size = huggingface.read_config(folder_store)
    model = Decoder(config, vocabulary_size)
    model.load_state_dict(dict(huggingface.read_weights(folder_store, config, vocabulary_size)), strict=True)
    return model.eval()


@torch.no_grad()
def logits_of(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, torch.zeros_like(tokens))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers_and_a_round_trip_is_exact(name: str, tmp_path: Path):
    oracle = theirs(name)
    oracle.save_pretrained(tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = oracle(tokens).logits
    torch.testing.assert_close(logits_of(model, tokens), expected, rtol=0, atol=1e-4)

    weights = model.state_dict()
    huggingface.write(store(tmp_path / "ours"), model.config, VOCABULARY,
                      lambda names: {item: weights[item] for item in names}, shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(oracle)
    for (key, value), (other, back) in zip(oracle.state_dict().items(), again.state_dict().items()):
        assert key == other
        assert torch.equal(value, back), key
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)
    for key, value in ours(tmp_path / "ours").state_dict().items():
        assert torch.equal(value, weights[key]), key


@pytest.mark.parametrize("preset", Llama.PRESETS)
def test_config_json_survives_a_round_trip(preset: str):
    config = Llama.model_validate({"preset": preset})
    values = json.loads(json.dumps(huggingface.to_config(config, 1024, eos=7)))
    back, vocabulary_size = huggingface.from_config(values, preset)
    assert vocabulary_size == 1024
    for name in type(config).model_fields:
        if name not in ("preset", "num_kv_heads", "head_dim", "ffn_dim"):
            assert getattr(back, name) == getattr(config, name), name
    assert (back.kv_heads, back.head_width, back.ffn_width) == (config.kv_heads, config.head_width, config.ffn_width)


def test_the_older_form_of_rope_settings_is_read():
    """Read the form of Llama-3.1-8B's config.json."""
    values = {**WIDTHS, "model_type": "llama", "rope_theta": 5e5,
              "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}}
    config, _ = huggingface.from_config(values, "config.json")
    assert (config.rope_theta, config.rope_scaling.factor, config.rope_scaling.original_length) == (5e5, 8.0, 8192)


@pytest.mark.parametrize(("changes", "says"), [
    ({"model_type": "mamba"}, "model_type is 'mamba'"),
    ({"attention_bias": True}, "attention_bias: True"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type: 'linear'"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type: 'yarn'"),
    ({"hidden_size": None}, "not complete"),
])
def test_variants_that_compute_differently_are_refused(changes: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        huggingface.from_config({**WIDTHS, "model_type": "llama", **changes}, "config.json")


def test_weights_that_do_not_fit_are_refused(tmp_path: Path):
    theirs("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    good = safetensors.torch.load_file(path)

    def refused(tensors: dict[str, torch.Tensor], says: str) -> None:
        safetensors.torch.save_file(tensors, path, {"format": "pt"})
        with pytest.raises(CheckpointError, match=says):
            ours(tmp_path)

    refused({**good, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, "q_proj.bias is not a known weight")
    refused({**good, "model.norm.weight": torch.zeros(33)}, r"model.norm.weight is \[33\], config.json says \[32\]")
    refused({name: tensor for name, tensor in good.items() if name != "lm_head.weight"}, "1 weights are missing, lm_h")
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        ours(tmp_path)
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are not loaded"):
        ours(tmp_path)


def test_a_model_in_remote_storage_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    theirs("llama").save_pretrained(tmp_path)
    own_state = ours(tmp_path).state_dict()
    monkeypatch.setattr(LocalStore, "local_path", lambda self, key: None)  # as of an object store
    for name, value in ours(tmp_path).state_dict().items():
        assert torch.equal(value, own_state[name])


def test_padding_the_vocabulary_keeps_logits_and_bounds_the_probability_of_new_tokens(tmp_path: Path):
    theirs("llama").save_pretrained(tmp_path)
    model = ours(tmp_path)
    wide = Decoder(model.config, VOCABULARY + 32)
    wide.load_state_dict({name: huggingface.padded(value, VOCABULARY + 32) if value.shape[0] == VOCABULARY else value
                          for name, value in model.state_dict().items()})
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = logits_of(wide, tokens)
    torch.testing.assert_close(logits[..., :VOCABULARY], logits_of(model, tokens))
    assert logits.softmax(-1)[..., VOCABULARY:].sum(-1).max() <= 32 / (VOCABULARY + 32) + 1e-6
